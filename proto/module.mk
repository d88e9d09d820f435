PROTO_FILES := $(wildcard proto/*.proto)
PROTO_SRC := $(PROTO_FILES:%.proto=$(GEN)/%.pb-c.c)
PROTO_HEADERS := $(PROTO_FILES:%.proto=$(GEN)/%.pb-c.h)
$(GEN)/%.pb-c.c $(GEN)/%.pb-c.h: %.proto
	@mkdir -p $(GEN)
	@echo "  PROTOC  $<"
	@protoc-c --c_out=$(GEN) $<
