"""To train any method: the loop, its optimizer, and the folder that a run writes to.

`trainer.fit`               the loop over epochs and steps
`short_run.short_run`       a short run in memory, for open-world fits and fine-tuning
`optimizer.learning_rate`   the learning rate of an epoch
`embedding.embed_images`    every image of a set, embedded in order
`run_folder.RunFolder`      files of a run, each written whole or not at all
"""
