DECODE_MAIN := decode_node/main.c decode_node/truncate_main.c decode_node/train_heads_main.c
DECODE_SRC := $(filter-out $(DECODE_MAIN),$(wildcard decode_node/*.c))
$(B)/libdecode_node.a: $(DECODE_SRC:%.c=$(B)/%.o)
	@rm -f $@; ar rcs $@ $^
ifneq ($(wildcard decode_node/main.c),)
PROGRAMS += tandem-decode tandem-truncate tandem-train-heads
$(BIN)/tandem-decode: $(B)/decode_node/main.o $(CUDA_LINK_OBJ) $(B)/libdecode_node.a $(B)/libkvstore.a $(B)/libtandem.a
	@mkdir -p $(@D); echo "  LD      $@"
	@$(CC) $(LDFLAGS_ALL) $^ $(LIBS_ALL) $(TIER_LIBS) $(CUDA_LIBS) -o $@
$(BIN)/tandem-truncate: $(B)/decode_node/truncate_main.o $(B)/libtandem.a
	@mkdir -p $(@D); echo "  LD      $@"
	@$(CC) $(LDFLAGS_ALL) $^ $(LIBS_ALL) -o $@
$(BIN)/tandem-train-heads: $(B)/decode_node/train_heads_main.o $(B)/libdecode_node.a $(B)/libtandem.a
	@mkdir -p $(@D); echo "  LD      $@"
	@$(CC) $(LDFLAGS_ALL) $^ $(LIBS_ALL) -o $@
endif
