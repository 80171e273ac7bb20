"""Rows of features and some labels in; seen classes and new groups out. It knows nothing of photos.

`fit.fit_features`      the whole fit, in order
`model.OpenWorldModel`  what it leaves behind: rows to classes, probabilities and novelty
"""
