"""How many classes are there? Every way to count has one interface: rows and some labels in, a `CountEstimate` out.

    tree  ours: one tree of groups for every number (`tree.estimate_classes`)
    gcd   as GCD counts: the k whose k-means groups fit the labeled rows best (`gcd.count_by_accuracy`)
    dtc   as DTC counts: seen classes are hidden, to see at which k they are found again (`dtc.count_by_probes`)

OpenCon's 124 classes for CIFAR-100 are DTC's estimate, which came by way of ORCA. What its footnote describes (cluster all
rows, take the number by which labeled rows are clustered best) is what `gcd` does.

The default everywhere, `engine`, also says which rows are whose. It is in the room openworld and joins these from there.

`gcd` and `dtc` are here for comparison. Both look at the seen classes, and both papers assume that novel classes resemble
them.
"""

from __future__ import annotations

from opencon.counting.base import Counter, CountEstimate
from opencon.counting.dtc import count_by_probes
from opencon.counting.gcd import count_by_accuracy
from opencon.counting.tree import estimate_classes
from opencon.registry import Registry

COUNTERS: Registry[Counter] = Registry("way to count")
COUNTERS.add("tree", estimate_classes)
COUNTERS.add("gcd", count_by_accuracy)
COUNTERS.add("dtc", count_by_probes)

__all__ = ["COUNTERS", "CountEstimate", "Counter", "count_by_accuracy", "count_by_probes", "estimate_classes"]
