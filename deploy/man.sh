#!/usr/bin/env bash
# Prints a program's manual page, made from what it says with --help: so it has each option that there is.
# usage: deploy/man.sh PROGRAM >PROGRAM.1
set -euo pipefail

[[ $# -eq 1 && -x $1 ]] || {
    echo 'usage: deploy/man.sh PROGRAM' >&2
    exit 2
}
name=$(basename "$1")
version=$("$1" --version | sed -n '1s/.* //p')
"$1" --help | awk -v name="$name" -v version="$version" '
    # A line that begins with a dot or a quote would be an order to roff.
    function plain(text) {
        gsub(/\\/, "\\e", text)
        gsub(/-/, "\\-", text)
        if (text ~ /^[.\x27]/) {
            text = "\\\\&" text
        }
        return text
    }
    function section(title) {
        if (in_block) {
            print ".fi"
            in_block = 0
        }
        print ".SH " title
    }
    NR == 1 {
        usage = $0
        sub(/^[Uu]sage: */, "", usage)
        next
    }
    # What it is, in one line.
    what == "" && NF > 0 && !/^ / && !/:$/ {
        what = $0
        next
    }
    { rest[++lines] = $0 }
    END {
        title = toupper(name)
        print ".TH " plain(title) " 1 \"\" \"Tandem " version "\""
        print ".SH NAME"
        short = what
        sub(/\.$/, "", short)
        print plain(name) " \\- " plain(short == "" ? "part of Tandem" : short)
        section("SYNOPSIS")
        print plain(usage)
        section("DESCRIPTION")
        print plain(what)
        for (i = 1; i <= lines; i++) {
            line = rest[i]
            if (line ~ /^  --[a-z]/) {
                if (!options) {
                    section("OPTIONS")
                    options = 1
                }
                head = substr(line, 3)
                text = ""
                cut = match(head, /  +/)
                if (cut > 0) {
                    text = substr(head, cut + RLENGTH)
                    head = substr(head, 1, cut - 1)
                }
                print ".TP"
                print ".B " plain(head)
                if (text != "") {
                    print plain(text)
                }
            } else if (options && line ~ /^    /) {
                sub(/^ +/, "", line)
                print plain(line)
            } else if (line == "") {
                print ".PP"
            } else if (options) {
                print ".PP"
                print plain(line)
            } else {
                if (line ~ /^ /) {
                    print ".br"
                }
                print plain(line)
            }
        }
        section("SEE ALSO")
        print ".BR tandemctl (1)"
        print ".PP"
        print "The operations guide: @PREFIX@/share/doc/tandem/OPERATIONS.md"
    }'
