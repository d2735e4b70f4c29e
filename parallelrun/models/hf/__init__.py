"""A model of Hugging Face transformers, trained under any plan: `model=hf model.path=DIR|config.json|CLASS`.

The module is the one that transformers builds from its configuration; `model.hf.KEY=VALUE` changes that configuration.
`model.task` chooses among its classes: `causal_lm`, `masked_lm` and `image_classification`. Its parameters have
transformers' names after `module.`, its initial weights are transformers' own under the run's seed, or those of
`init.from=DIR`. Tensor parallelism follows the plan that the class brings (`_tp_plan`), which `model.roles` corrects.
Everything else is as for `model=module`: `models/module` inspects the module and makes it a network.
"""
