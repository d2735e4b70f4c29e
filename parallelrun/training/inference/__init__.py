"""Uses of trained weights on one process: generated text (`generate`) and scores on a dataset (`evaluate`)."""

SPLITS = {"val": ("val",), "train": ("train",), "all": ("train", "val")}  # of `eval`: parts of the dataset by name
