"""Rows into groups, and what groups are then called.

`kmeans.kmeans`             k-means; with labels, the semi-supervised k-means of GCD
`merging.merge_alike`       two groups that are halves of one class become one
`naming.cluster_and_name`   clusters get the names of seen classes, by their labeled rows
`numbering.by_size`         new groups are numbered, the largest first
"""
