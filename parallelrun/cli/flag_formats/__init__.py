"""Other runners' settings to a recipe: Megatron-LM arguments, torchtitan job configs, DeepSpeed JSON, accelerate YAML.

`sources` recognises a format by its content and reads its settings with their lines. `table` translates them by the
format's table (`megatron.yaml`, ...). `recipe` writes and checks the result. No code of the file is run.
"""
