"""Weights in and out: directories of Hugging Face transformers, plain safetensors, and our own checkpoints.

`source` opens any of them as named logical tensors that can be read in part, `export` writes them, `imported` makes a
checkpoint of a directory. The names and layouts of a class of transformers are in the module `hugging_face` of a model.
"""
