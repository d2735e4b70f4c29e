"""Other runners' settings to a recipe: Megatron-LM arguments, torchtitan job configs, DeepSpeed JSON, accelerate YAML.

`sources` recognises a format by its content and reads its settings with their lines. Each format has one table of data
(`megatron.yaml`, ...), which `table` reads; `derived` has the values that follow from several settings. `recipe` writes
the result. No torch, no code of the file is run.
"""
