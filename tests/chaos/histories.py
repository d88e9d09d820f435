"""What a store may answer: the workers' histories, compared with what was put and removed.

A store of immutable blocks that may lose any of them at any time has few duties, and they are hard:

1. What was read was put under that key, whole, by a put that had begun before the read ended.
2. After a removal has been answered "ok", no read that begins gives what an earlier put, ended
   before the removal began, had put. (Unless the master changed in between: its index is soft.)
"""
import collections

Put = collections.namedtuple("Put", "key begin")
Read = collections.namedtuple("Read", "key content begin end worker")
Removal = collections.namedtuple("Removal", "key begin end")


class History:
    """Of all workers together."""

    def __init__(self):
        self.puts = {}  # content -> Put
        self.ends = {}  # content -> ns
        self.reads = []
        self.removals = []
        self.counts = collections.Counter()
        self.faults = []

    def add(self, text, worker):
        lines = text.split("\n")
        for line in lines[:-1]:  # the last may be half, if its writer was killed
            words = line.split()
            self.counts[words[0]] += 1
            if words[0] == "put":
                self.puts[words[2]] = Put(int(words[1]), int(words[3]))
            elif words[0] == "end":
                self.ends[words[1]] = int(words[2])
            elif words[0] == "read":
                self.reads.append(Read(int(words[1]), words[2], int(words[3]), int(words[4]),
                                       worker))
            elif words[0] == "remove":
                self.counts[f"remove {words[2]}"] += 1
                if words[2] == "ok":
                    self.removals.append(Removal(int(words[1]), int(words[3]), int(words[4])))
            elif words[0] == "wrong":
                self.faults.append(f"{worker}: bytes that nobody wrote: {line}")
            elif words[0] == "lives" and words[1] != "0":
                self.faults.append(f"{worker}: {words[1]} blocks held at the end")

    def check(self, master_changes):
        """Texts that say what is wrong. master_changes: ns of the same clock."""
        faults = list(self.faults)
        removals = collections.defaultdict(list)
        for removal in self.removals:
            removals[removal.key].append(removal)
        for read in self.reads:
            put = self.puts.get(read.content)
            if put is None or put.key != read.key or put.begin > read.end:
                faults.append(f"never put there: {read}, {put}")
                continue
            ended = self.ends.get(read.content)
            for removal in removals[read.key]:
                if (ended is not None and ended < removal.begin and removal.end < read.begin and
                        not any(removal.begin < at < read.end for at in master_changes)):
                    faults.append(f"read after its removal: {read}, put ended {ended}, {removal}")
                    break
        return faults
