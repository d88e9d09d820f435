ROUTER_MAIN := router/main.c router/sim_main.c
ROUTER_SRC := $(filter-out $(ROUTER_MAIN),$(wildcard router/*.c))
$(B)/librouter.a: $(ROUTER_SRC:%.c=$(B)/%.o)
	@rm -f $@; ar rcs $@ $^
ifneq ($(wildcard router/main.c),)
PROGRAMS += tandem-router tandem-sim
$(BIN)/tandem-router: $(B)/router/main.o $(B)/librouter.a $(B)/libkvstore.a $(B)/libtandem.a
	@mkdir -p $(@D); echo "  LD      $@"
	@$(CC) $(LDFLAGS_ALL) $^ $(LIBS_ALL) -o $@
$(BIN)/tandem-sim: $(B)/router/sim_main.o $(B)/librouter.a $(B)/libtandem.a
	@mkdir -p $(@D); echo "  LD      $@"
	@$(CC) $(LDFLAGS_ALL) $^ $(LIBS_ALL) -o $@
endif
