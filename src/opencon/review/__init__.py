"""A person looks at a discovery in a browser: names, merges, splits, moves; the machine learns again.

`run.open_run`           what `discover` left in its folder, read only
`log.DecisionLog`        what the person decided, one line each, on disk before the page says so
`state.State`            the groups now: the discovery, and every decision replayed
`suggest.likely_merges`  what to look at next: groups that may be one, parts of a group, photos alike
`learn.Learner`          a new fit in a process of its own, from the decisions
`take.sort_photos`       photos into folders, tables and data sets to take elsewhere
`server.serve`           all of it on this machine's own address, for one browser
"""
