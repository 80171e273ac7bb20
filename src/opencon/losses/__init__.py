"""Losses as pure functions of tensors: no state, no configuration, no knowledge of any method.

`contrastive.info_nce`         InfoNCE over a masked similarity matrix; the masks make the loss
`contrastive.contrast_within`  the same within a subset of the rows, in blocks where there are many
`balance.kl_to_prior`          the mean prediction against the expected shares of classes
`pairwise.pair_bce`            do these two belong together?
"""
