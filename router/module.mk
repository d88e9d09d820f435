ROUTER_SRC := $(filter-out router/main.c,$(wildcard router/*.c))
$(B)/librouter.a: $(ROUTER_SRC:%.c=$(B)/%.o)
	@rm -f $@; ar rcs $@ $^
ifneq ($(wildcard router/main.c),)
PROGRAMS += tandem-router
$(BIN)/tandem-router: $(B)/router/main.o $(B)/librouter.a $(B)/libkvstore.a $(B)/libtandem.a
	@mkdir -p $(@D); echo "  LD      $@"
	@$(CC) $(LDFLAGS_ALL) $^ $(LIBS_ALL) -o $@
endif
