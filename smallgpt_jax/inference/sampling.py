"""How the next token is chosen from the logits."""

import flax
import jax
import jax.numpy as jnp

from smallgpt_jax.errors import UserError


@flax.struct.dataclass
class Sampling:
    """Settings of a choice. Those that are None cost nothing; `check` says what they may be.

    Applied in this order: repetition penalty, temperature, top-k, top-p.
    """

    temperature: float | None = 1.0  # of softmax(logits / temperature); None or 0: the likeliest token
    top_k: int | None = flax.struct.field(pytree_node=False, default=None)  # among this many likeliest
    top_p: float | None = None  # among the likeliest that together have this probability
    repetition_penalty: float | None = None  # of tokens that the text has in the context; 1: none

    def check(self) -> "Sampling":
        """The same, with what has no effect set to None. Raises UserError for what is out of range."""
        def refuse(field: str, rule: str):
            raise UserError(f"{field}={getattr(self, field)}: {rule}")

        if self.temperature is not None and not 0 <= self.temperature < float("inf"):
            refuse("temperature", "must be a number, not negative")
        if self.top_k is not None and self.top_k < 1:
            refuse("top_k", "must be at least 1")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            refuse("top_p", "must be above 0 and at most 1")
        if self.repetition_penalty is not None and not 0 < self.repetition_penalty < float("inf"):
            refuse("repetition_penalty", "must be a number above 0")
        return self.replace(temperature=self.temperature or None,
                            top_p=None if self.top_p == 1 else self.top_p,
                            repetition_penalty=None if self.repetition_penalty == 1 else
                            self.repetition_penalty)


def sample(logits_BxV, seen_BxV, sampling: Sampling, key_B):
    """One token a row, (B,) int32. `seen_BxV`: the tokens a row has; read for the penalty only."""
    logits_BxV = filtered(logits_BxV, seen_BxV, sampling)
    if sampling.temperature is not None:  # the Gumbel trick: the largest of these is a draw from the softmax
        logits_BxV += jax.vmap(lambda key: jax.random.gumbel(key, logits_BxV.shape[1:]))(key_B)
    return likeliest(logits_BxV)


def likeliest(logits_BxV):
    """argmax, (B,) int32; the last token where there is NaN. In two passes: XLA has a slow loop for one on CPUs."""
    last = logits_BxV.shape[1] - 1
    is_largest_BxV = logits_BxV == jnp.max(logits_BxV, axis=1, keepdims=True)
    return jnp.min(jnp.where(is_largest_BxV, jnp.arange(last + 1)[None], last), axis=1).astype(jnp.int32)


def filtered(logits_BxV, seen_BxV, sampling: Sampling):
    """The logits that are drawn from; −∞ for what is left out.

    The penalty divides positive logits and multiplies negative ones (Keskar et al., arXiv
    1909.05858, section 4.1, in the form for either sign); top-p keeps the smallest set of likeliest
    tokens whose probabilities reach p (Holtzman et al., arXiv 1904.09751, section 3.1).
    """
    if (penalty := sampling.repetition_penalty) is not None:
        penalised = jnp.where(logits_BxV > 0, logits_BxV / penalty, logits_BxV * penalty)
        logits_BxV = jnp.where(seen_BxV, penalised, logits_BxV)
    if sampling.temperature is None:
        return logits_BxV
    logits_BxV = logits_BxV / sampling.temperature
    vocab_size = logits_BxV.shape[1]
    if sampling.top_k is not None and sampling.top_k < vocab_size:
        least = jax.lax.top_k(logits_BxV, sampling.top_k)[0][:, -1:]
        logits_BxV = jnp.where(logits_BxV < least, -jnp.inf, logits_BxV)
    if sampling.top_p is not None:
        sorted_BxV = jnp.sort(logits_BxV, axis=1, descending=True)
        probabilities = jax.nn.softmax(sorted_BxV)
        before = jnp.cumsum(probabilities, axis=1) - probabilities
        least = jnp.min(jnp.where(before < sampling.top_p, sorted_BxV, jnp.inf), axis=1, keepdims=True)
        logits_BxV = jnp.where(logits_BxV < least, -jnp.inf, logits_BxV)
    return logits_BxV
