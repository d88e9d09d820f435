ROUTER_SRC := $(filter-out router/main.c router/sim_main.c router/ctl_%.c,$(wildcard router/*.c))
$(B)/librouter.a: $(ROUTER_SRC:%.c=$(B)/%.o)
	@rm -f $@; ar rcs $@ $^
$(B)/router/rtr_page.o: router/status_page.html router/openapi.json
ifneq ($(wildcard router/main.c),)
PROGRAMS += tandem-router tandem-sim tandemctl
$(BIN)/tandem-router: $(B)/router/main.o $(B)/librouter.a $(B)/libkvstore.a $(B)/libtandem.a
	@mkdir -p $(@D); echo "  LD      $@"
	@$(CC) $(LDFLAGS_ALL) $^ $(LIBS_ALL) -o $@
$(BIN)/tandemctl: $(B)/router/ctl_main.o $(B)/router/ctl_wire.o $(B)/libtandem.a
	@mkdir -p $(@D); echo "  LD      $@"
	@$(CC) $(LDFLAGS_ALL) $^ $(LIBS_ALL) -o $@
$(BIN)/tandem-sim: $(B)/router/sim_main.o $(B)/librouter.a $(B)/libtandem.a
	@mkdir -p $(@D); echo "  LD      $@"
	@$(CC) $(LDFLAGS_ALL) $^ $(LIBS_ALL) -o $@
endif
