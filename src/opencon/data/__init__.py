"""Images in, batches out: where images come from, which of them keep their label, and how they reach the device.

`benchmarks.load_dataset`   a data set by name; `catalog` adds those of photos
`sources.read_images`       files to one uint8 tensor
`tables.read_table`         the tables that people write, such as path,label
`split.make_split`          which images are labeled
`augment.Augment`           random views
`loader.TwoStreamLoader`    labeled and unlabeled images as one `loader.Batch`
"""

from opencon.data import catalog  # noqa: F401 (adds its data sets to DATASETS, whichever part of the room is entered first)
