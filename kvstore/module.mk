KVSTORE_SRC := $(filter-out kvstore/main.c,$(wildcard kvstore/*.c))
$(B)/libkvstore.a: $(KVSTORE_SRC:%.c=$(B)/%.o)
	@rm -f $@; ar rcs $@ $^
ifneq ($(wildcard kvstore/main.c),)
PROGRAMS += tandem-kvstore
$(BIN)/tandem-kvstore: $(B)/kvstore/main.o $(B)/libkvstore.a $(B)/libtandem.a
	@mkdir -p $(@D); echo "  LD      $@"
	@$(CC) $(LDFLAGS_ALL) $^ $(LIBS_ALL) $(TIER_LIBS) -o $@
endif
