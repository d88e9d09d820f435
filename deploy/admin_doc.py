#!/usr/bin/env python3
"""Makes the reference of the admin RPC, deploy/ADMIN.md, from proto/admin.proto: each command with its request, its
answer, and what the comments say of their fields.

usage: deploy/admin_doc.py [--check]     (--check: exit 1 where the file is not what would be made)
"""
import os
import re
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
PROTO = os.path.join(ROOT, "proto/admin.proto")
TARGET = os.path.join(ROOT, "deploy/ADMIN.md")
FIELD = re.compile(r"(repeated )?([\w.]+) (\w+) = (\d+);\s*(?://\s*(.*))?$")
VALUE = re.compile(r"(\w+) = (\d+);\s*(?://\s*(.*))?$")
SCALARS = {"bool", "string", "bytes", "double", "float", "uint32", "uint64", "sint32", "sint64", "int32", "int64",
           "fixed32", "fixed64"}


class Block:
    """A message or an enum."""

    def __init__(self, kind, name, comment):
        self.kind, self.name, self.comment = kind, name, comment
        self.rows = []  # [repeated, type, name, number, comment, oneof]


def parse(text):
    blocks, comment, block, oneof = [], [], None, None
    for line in text.splitlines():
        line = line.strip()
        if line.startswith("//"):
            if block is not None and block.rows:
                block.rows[-1][4] = f"{block.rows[-1][4]} {line[2:].strip()}".strip()
            else:
                comment.append(line[2:].strip())
            continue
        opened = re.match(r"(message|enum) (\w+) \{(\})?", line)
        if opened:
            block = Block(opened[1], opened[2], " ".join(comment))
            blocks.append(block)
            comment = []
            block = None if opened[3] else block
        elif re.match(r"oneof (\w+) \{", line):
            oneof = line.split()[1]
        elif line == "}":
            if oneof:
                oneof = None
            else:
                block = None
        elif block is not None:
            if block.kind == "enum":
                found = VALUE.match(line)
                block.rows.append([False, "", found[1], found[2], found[3] or "", None])
            else:
                found = FIELD.match(line)
                block.rows.append([bool(found[1]), found[2], found[3], found[4], found[5] or "", oneof])
        else:
            comment = []
    return blocks


def anchor(name):
    return name.lower()


def type_text(repeated, kind):
    text = f"`{kind}`" if kind in SCALARS else f"[{kind}](#{anchor(kind)})"
    return f"list of {text}" if repeated else text


def table(block):
    if block.kind == "enum":
        lines = ["| value | number | |", "|---|---|---|"]
        lines += [f"| `{name}` | {number} | {comment} |" for _, _, name, number, comment, _ in block.rows]
    else:
        lines = ["| field | type | number | |", "|---|---|---|---|"]
        lines += [f"| `{name}` | {type_text(repeated, kind)} | {number} | {comment} |"
                  for repeated, kind, name, number, comment, _ in block.rows]
    return lines if block.rows else ["No fields."]


def render(blocks):
    by_name = {block.name: block for block in blocks}
    request, reply = by_name["Request"], by_name["Reply"]
    answers = {row[2]: row[1] for row in reply.rows if row[5]}
    lines = [
        "# The admin RPC", "",
        "Made from `proto/admin.proto` by `deploy/admin_doc.py`; change that, not this.", "",
        "A client's DEALER socket speaks to the ROUTER socket of `tandem-router --admin ENDPOINT --admin-keys FOLDER`, "
        "with CURVE keys (`tandemctl keygen`). A `Request` and a `Reply` are one ZeroMQ message each, Protocol Buffers "
        "of package `tandem.admin.v1`. Replies may come in another order than requests: `id` tells which. "
        "`tandemctl` and `tests/clients/admin.py` (Python) are clients; limits stand in `router/DESIGN.md`.", "",
        "## Commands", "", "| command | asks with | is answered by | |", "|---|---|---|---|"]
    for _, kind, name, _, _, oneof in request.rows:
        if oneof:
            answer = answers.get(name) or {"subscribe": "Events"}.get(name)
            lines.append(f"| `{name}` | [{kind}](#{anchor(kind)}) | "
                         f"{f'[{answer}](#{anchor(answer)})' if answer else 'the code alone'} | "
                         f"{by_name[kind].comment} |")
    for title, kinds in (("Request and Reply", ("Request", "Reply", "Code")), ("Messages", None)):
        lines += ["", f"## {title}"]
        for block in blocks:
            if (block.name in ("Request", "Reply", "Code")) == (kinds is not None):
                lines += ["", f"### {block.name}", ""]
                lines += [block.comment, ""] if block.comment and block.name != "Request" else []
                lines += table(block)
    return "\n".join(lines) + "\n"


def main():
    with open(PROTO, encoding="utf-8") as file:
        text = render(parse(file.read()))
    if sys.argv[1:] == ["--check"]:
        with open(TARGET, encoding="utf-8") as file:
            if file.read() != text:
                sys.exit("deploy/ADMIN.md is not what proto/admin.proto says: run deploy/admin_doc.py")
    elif sys.argv[1:]:
        sys.exit(__doc__)
    else:
        with open(TARGET, "w", encoding="utf-8") as file:
            file.write(text)


if __name__ == "__main__":
    main()
