"""Experiments as in the papers: a method on a data set, trained, measured and compared.

`recipes.get_recipe`      every setting of METHOD/DATASET
`train.train`             a run into its folder
`evaluate.evaluate_run`   a trained run, measured again
`compare.compare_runs`    runs side by side, with the published numbers
`demo.run_demo`           the demonstration
"""
