DECODE_SRC := $(filter-out decode_node/main.c,$(wildcard decode_node/*.c))
$(B)/libdecode_node.a: $(DECODE_SRC:%.c=$(B)/%.o)
	@rm -f $@; ar rcs $@ $^
ifneq ($(wildcard decode_node/main.c),)
PROGRAMS += tandem-decode
$(BIN)/tandem-decode: $(B)/decode_node/main.o $(B)/libdecode_node.a $(B)/libkvstore.a $(B)/libtandem.a
	@mkdir -p $(@D); echo "  LD      $@"
	@$(CC) $(LDFLAGS_ALL) $^ $(LIBS_ALL) $(TIER_LIBS) -o $@
endif
