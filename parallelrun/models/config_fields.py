"""The fields of a config.json of Hugging Face transformers, read one by one."""

from __future__ import annotations

from collections.abc import Mapping
from math import log
from typing import Any

from parallelrun.base.errors import ConfigError, Problem

MISSING = object()
# Fields of config.json that do not change what the model computes, or only in training.
HARMLESS = frozenset({
    "architectures", "model_type", "transformers_version", "torch_dtype", "dtype", "_name_or_path", "use_cache",
    "bos_token_id", "eos_token_id", "pad_token_id", "task_specific_params", "pretraining_tp", "gradient_checkpointing",
    "output_router_logits", "summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels",
    "summary_first_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop", "attention_dropout", "hidden_dropout_prob",
    "attention_probs_dropout_prob", "classifier_dropout", "n_ctx", "reorder_and_upcast_attn", "output_attentions",
    "output_hidden_states", "return_dict", "chunk_size_feed_forward", "id2label", "label2id", "problem_type",
    "num_nextn_predict_layers", "num_mtp_layers", "auto_map", "ep_size", "seq_aux", "quantization_config",
})  # fmt: skip

# By `model.rope_scaling`: the fields of config.json and our keys.
ROPE_KEYS: dict[str, dict[str, str]] = {
    "none": {},
    "linear": {"factor": "rope_factor"},
    "llama3": {
        "factor": "rope_factor",
        "low_freq_factor": "rope_low_factor",
        "high_freq_factor": "rope_high_factor",
        "original_max_position_embeddings": "rope_original_seq",
    },
    "yarn": {
        "factor": "rope_factor",
        "original_max_position_embeddings": "rope_original_seq",
        "beta_fast": "rope_beta_fast",
        "beta_slow": "rope_beta_slow",
        "mscale": "rope_mscale",
        "mscale_all_dim": "rope_mscale_all_dim",
    },
}
# What fields stand for that config.json leaves out.
_ROPE_DEFAULTS = {"beta_fast": 32.0, "beta_slow": 1.0, "mscale": None, "mscale_all_dim": None}


class Fields:
    """config.json, whose fields are read one by one, so that none is overlooked. where: the file, for messages."""

    def __init__(self, content: Mapping[str, Any], where: str):
        self._left = {key: value for key, value in content.items() if key not in HARMLESS}
        self._where = where
        self._problems: list[Problem] = []

    def take(self, key: str, kind: type, default: Any = MISSING, nullable: bool = False) -> Any:
        """The value of `key`, else `default`; a wrong or missing one is noted for `finish`. nullable: null is right."""
        value = self._left.pop(key, default)
        if value is MISSING:
            self._problems.append(Problem(f"there is no {key}", self._where))
            return kind()
        if value is None and (nullable or default is None):
            return None
        if kind is float and type(value) is int:
            return float(value)
        if type(value) is not kind:
            self._problems.append(Problem(f"{key} is {value!r:.100}, not a {kind.__name__}", self._where))
            return kind()
        return value

    def translate(self, key: str, ours: Mapping[Any, Any], default: Any) -> Any:
        """Our name for the value of `key`."""
        value = self._left.pop(key, default)
        if isinstance(value, (dict, list)) or value not in ours:
            names = ", ".join(str(our) for our in ours)
            self._problems.append(Problem(f"{key} is {value!r:.200}, and only {names} is built", self._where))
            return next(iter(ours.values()))
        return ours[value]

    def expect(self, key: str, *allowed: Any) -> None:
        """Note a problem unless `key` has one of the allowed values, the first of which is the default."""
        self.translate(key, dict.fromkeys(allowed), allowed[0])

    def drop(self, *keys: str) -> None:
        """Leave fields out that change nothing under the values of others."""
        for key in keys:
            self._left.pop(key, None)

    def rotary(self, default_theta: float, partial: float = 1.0, latent: bool = False) -> dict[str, Any]:
        """The values of `model.rope_*`, from fields as transformers 5 writes them or earlier versions do.

        partial: the share of a head that is rotated if config.json does not say; only 1 is built. latent: whether the
        class has latent attention, whose scores grow.
        """
        values: dict[str, Any] = {"rope_theta": self.take("rope_theta", float, default_theta)}
        share = self.take("partial_rotary_factor", float, partial)
        for name in ("rope_parameters", "rope_scaling"):
            scaling = self._left.pop(name, None) or {}
            kind = scaling.get("rope_type", scaling.get("type", "default")) if isinstance(scaling, dict) else None
            kind = "none" if kind == "default" else kind
            if not isinstance(kind, str) or kind not in ROPE_KEYS:
                message = f"{name} is {scaling!r:.200}, and only default, linear, llama3 and yarn are built"
                self._problems.append(Problem(message, self._where))
                continue
            inner = Fields(scaling, f"{self._where}, {name}")
            values["rope_theta"] = inner.take("rope_theta", float, values["rope_theta"])
            share = inner.take("partial_rotary_factor", float, share)
            for key in ("rope_type", "type"):
                inner._left.pop(key, None)
            if kind != "none":
                values["rope_scaling"] = kind
                kinds = {key: int if key.startswith("original") else float for key in ROPE_KEYS[kind]}
                for key, ours in ROPE_KEYS[kind].items():
                    values[ours] = inner.take(key, kinds[key], _ROPE_DEFAULTS.get(key, MISSING))
                if kind == "yarn":
                    values["rope_truncate"] = inner.take("truncate", bool, True)
                    values |= _growth(inner, values, latent)
            self._problems += inner.problems()
        if share != 1.0:
            message = f"partial_rotary_factor is {share:g}: our model rotates whole heads"
            self._problems.append(Problem(message, self._where))
        return values

    def local_rotary(self, default_theta: float, local: str, others: str) -> float:
        """The rotary base of the layers of type `local`, which are not scaled; leaves those of `others` to `rotary`."""
        theta: float = self.take("rope_local_base_freq", float, default_theta)
        both = self._left.get("rope_parameters")
        if isinstance(both, dict) and others in both:
            self._left["rope_parameters"] = both[others]
            inner = Fields(both.get(local) or {}, f"{self._where}, rope_parameters of {local}")
            theta = inner.take("rope_theta", float, theta)
            inner.expect("rope_type", "default")
            self._problems += inner.problems()
        return theta

    def note(self, message: str) -> None:
        """Note a problem of several fields together."""
        self._problems.append(Problem(message, self._where))

    def problems(self) -> list[Problem]:
        """Every problem, and the fields that nobody has read."""
        unknown = [key for key, value in self._left.items() if value not in (None, False, {}, [])]
        return self._problems + [
            Problem(f"{key} is {self._left[key]!r:.100}, a field that parallelrun does not know", self._where)
            for key in unknown
        ]

    def finish(self) -> None:
        """Raise ConfigError with every problem."""
        if problems := self.problems():
            raise ConfigError(*problems)


def _growth(scaling: Fields, values: Mapping[str, Any], latent: bool) -> dict[str, float]:
    """`model.rope_mscale` and `rope_mscale_all_dim` of yarn. transformers reads the fields of these names if both are
    there, and neither beside `attention_factor`."""
    factor = None if latent else scaling.take("attention_factor", float, None)
    scale, of_all = values["rope_mscale"], values["rope_mscale_all_dim"]
    if factor is None:
        if latent and of_all and not scale:
            scaling.note(f"mscale_all_dim is {of_all:g}, and only 0 is built without mscale")
        return {} if scale and of_all else {"rope_mscale": 1.0, "rope_mscale_all_dim": 0.0}
    if values["rope_factor"] <= 1.0 or factor < 1.0:
        scaling.note(f"attention_factor is {factor:g}, and only one above 1 with a factor above 1 is built")
        return {}
    return {"rope_mscale": (factor - 1.0) / (0.1 * log(values["rope_factor"])), "rope_mscale_all_dim": 0.0}
