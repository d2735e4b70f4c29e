"""BERT (Devlin et al. 2019): a bidirectional encoder trained to fill in masked tokens.

A post-LN encoder with the masked-language-model head: transform, activation, norm, tied decoder without a bias over the
vocabulary. Left out, as in RoBERTa (Liu et al. 2019): next-sentence prediction with its pooler, and token types.

Parallel as gpt, but without experts.
"""
