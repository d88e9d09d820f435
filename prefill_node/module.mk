PREFILL_SRC := $(filter-out prefill_node/main.c,$(wildcard prefill_node/*.c))
$(B)/libprefill_node.a: $(PREFILL_SRC:%.c=$(B)/%.o)
	@rm -f $@; ar rcs $@ $^
ifneq ($(wildcard prefill_node/main.c),)
PROGRAMS += tandem-prefill
$(BIN)/tandem-prefill: $(B)/prefill_node/main.o $(CUDA_LINK_OBJ) $(B)/libprefill_node.a $(B)/libkvstore.a $(B)/libtandem.a
	@mkdir -p $(@D); echo "  LD      $@"
	@$(CC) $(LDFLAGS_ALL) $^ $(LIBS_ALL) $(TIER_LIBS) $(CUDA_LIBS) -o $@
endif
