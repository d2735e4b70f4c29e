"""Other runners' settings to a recipe: Megatron-LM arguments, torchtitan job configs, DeepSpeed JSON, accelerate YAML.

`sources` recognises a format by its content and reads its settings with their lines. Each format has one module with
one table: the name of a setting -> our key and a conversion, or the reason why it has no counterpart. `recipe` writes
the result. No torch, no code of the file is run.
"""
