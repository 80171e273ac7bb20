"""A folder of photos, a few of them labeled: from the files to a model that can be kept.

`listing.find_photos`       which photos there are, and their labels
`features.photo_features`   photos to rows of features, kept in `cache.FeatureCache`
`discover.discover_photos`  photos to groups, model, table and page
`model.OpenConModel`        the model, and what it says of new photos
`run_model.RunModel`        a run of `opencon train` as such a model
`names.rename_groups`       names for new groups
`export.export_folder`      a copy to take elsewhere, as a folder and as ONNX
"""

from opencon.photos import run_model as run_model  # so that `OpenConModel.from_pretrained` knows runs
