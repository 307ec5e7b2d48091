"""What a reader should know before relying on the answers."""

from collections.abc import Sequence

from smallgpt_jax.analysis.findings import Findings, Range
from smallgpt_jax.analysis.record import Record, Run, grouped, model_of
from smallgpt_jax.report import words

COMPUTE_OPTIMAL = 20  # tokens per parameter (Hoffmann et al., arXiv 2203.15556)
UNCOUNTED = 1.05  # ratio of the work of two runs at equal FLOPs above which the report warns
FEW_TARGETS = 16_384  # validation tokens below which the report warns
MAX_NAMES = 6  # in a sentence
_RATE_AND_SEED = ("optimizer.learning_rate", "optimizer.final_learning_rate", "train.seed")
_PROCESSOR_FIELDS = ("cpu family", "model")  # which tell processors of one name apart


def cautions(findings: Findings, record: Record) -> list[str]:
    """Returns sentences, the most important first."""
    runs = record.runs
    if not runs:
        return ["The comparison has no runs."]
    return [
        *_unfinished(runs),
        *_learning_rates(findings, runs),
        *_single_rates(findings, runs),
        *_untried(findings, runs),
        *_short_training(runs),
        *uncounted_work(runs),
        *_other_machines(runs),
        *_other_losses(runs),
        *_validation(findings, runs),
    ]


def _unfinished(runs: Sequence[Run]) -> list[str]:
    """Warns of runs that diverged, are unfinished, or did not start from random weights."""
    sentences, unfinished = [], []
    for run in runs:
        where = f"{run.label}, seed {run.seed}"
        if run.diverged:
            at = f"diverged at step {run.steps_done:,}"
            sentences.append(f"{where}, {at}: its loss counts as infinite.")
        elif not run.is_finished:
            unfinished.append(f"{where}, at step {run.steps_done:,} of {run.steps:,}")
    if unfinished:
        sentences.append(f"Unfinished: {_few(unfinished, '; ')}.")
    imported = dict.fromkeys(run.name for run in runs if run.is_imported)
    if imported:
        sentences.append(f"Started from imported models, not from scratch: {_few(list(imported))}.")
    return sentences


def _learning_rates(findings: Findings, runs: Sequence[Run]) -> list[str]:
    """Warns of learning rates that may not be the best, or were chosen by a seed that counts."""
    sentences = []
    for edge in ("lowest", "highest"):
        names = [one.name for one in findings.rates if one.edge == edge]
        if names:
            sentences.append(
                f"The best learning rate is the {edge} that was tried, so one beyond it may be "
                f"better: {_few(names)}. To try more, increase "
                "config.compare.max_added_learning_rates."
            )
    unsure = [one.name for one in findings.rates if len(one.plausible) > 1]
    if unsure:
        sentences.append(
            "Which learning rate is best is within the spread over seeds, so the models may be "
            f"better at another one: {_few(unsure)}."
        )
    counted = {(run.name, run.seed) for run in runs}
    biased = [one.name for one in findings.rates if (one.name, one.grid.seed) in counted]
    if biased:
        sentences.append(
            "The seed that chose the learning rate is also in the mean, which is therefore too low: "
            f"{_few(biased)}."
        )
    return sentences


def _single_rates(findings: Findings, runs: Sequence[Run]) -> list[str]:
    """Warns of models of which nothing shows that they are at a good learning rate."""
    tuned = {model_of(one.name) for one in findings.rates}
    # Models that differ in nothing but the rate try several rates, too.
    for group in grouped(runs, _fields_but_rate).values():
        if len({run.learning_rate for run in group}) > 1:
            tuned.update(run.model for run in group)
    models = dict.fromkeys(run.model for run in runs)
    untuned = [model for model in models if model not in tuned]
    if len(models) < 2 or not untuned:
        return []
    whose = _few(untuned) if len(untuned) < len(models) else "each model"
    return [
        f"Only one learning rate was tried for {whose}; at the best ones, the order may be "
        "different. To try more, set config.compare.learning_rates."
    ]


def _fields_but_rate(run: Run) -> str:
    others = {name: value for name, value in run.config.items() if name not in _RATE_AND_SEED}
    return repr(sorted(others.items()))


def _untried(findings: Findings, runs: Sequence[Run]) -> list[str]:
    """Warns of names whose longest training is their model's best: more tokens may be better still."""
    if not findings.untried:
        return []
    ratios = findings.untried.values()
    lengths = words.amounts(Range(min(ratios), max(ratios)))
    count, total = len(ratios), len({run.name for run in runs})
    text = (
        f"The longest training is the best one for {count} of {total} sizes of models "
        f"({lengths} tokens per parameter), so even more tokens may be better at the same FLOPs"
    )
    if count < total:
        text += f": {_few(list(findings.untried))}"
    return [f"{text}."]


def _short_training(runs: Sequence[Run]) -> list[str]:
    most = max(run.tokens / run.active_parameters for run in runs)
    if most >= 0.9 * COMPUTE_OPTIMAL:  # nearly as many
        return []
    return [
        f"No run has more than {most:.2g} tokens per parameter. About {COMPUTE_OPTIMAL} are "
        "compute-optimal (Hoffmann et al., arXiv 2203.15556); after longer training, the order may "
        "be different."
    ]


def uncounted_work(runs: Sequence[Run]) -> list[str]:
    """Warns of unknown FLOPs, and of models that do unequal work besides the FLOPs."""
    problems = {run.name: run.flops_problem for run in runs if run.flops_problem}
    sentences = [f"The FLOPs of {name} are unknown: {why}." for name, why in problems.items()]
    uncounted: dict[str, float] = {}  # by model, per FLOP
    for run in runs:
        if run.uncounted is not None:
            uncounted[run.model] = max(run.uncounted, uncounted.get(run.model, 0.0))
    if not uncounted:
        return sentences
    least, most = min(uncounted, key=uncounted.get), max(uncounted, key=uncounted.get)
    # Of two runs at equal FLOPs, this is how much more work one does: 1.12 / 1.03 = 1.09.
    if (1 + uncounted[most]) / (1 + uncounted[least]) > UNCOUNTED:
        sentences.append(
            "FLOPs count only matrix products and convolutions. Other arithmetic (norms, softmax, "
            f"recurrences) comes on top: {uncounted[least]:.0%} in {least} to "
            f"{uncounted[most]:.0%} in {most}."
        )
    return sentences


def _other_machines(runs: Sequence[Run]) -> list[str]:
    machines = grouped((run for run in runs if run.sessions), _machine)
    if len(machines) < 2:
        return []
    counts = [f"{label} ({words.plural(len(on_it), 'run')})" for label, on_it in machines.items()]
    return [
        f"Trained on different machines: {_few(counts, '; ')}. Times and speeds are not "
        "comparable. Machines round differently, which changes a loss as another seed does, so "
        "a single seed of each tells nothing."
    ]


def _other_losses(runs: Sequence[Run]) -> list[str]:
    """Warns of losses that are not of the same tokens or objective."""
    sentences = []
    targets = {run.last.targets for run in runs if run.last}
    if targets and max(targets) > 1.01 * min(targets):
        sentences.append(
            f"The last losses are means over different rows, {min(targets):,} to "
            f"{max(targets):,} tokens. To evaluate a finished run again, rerun it with another "
            "config.train.eval_steps."
        )
    objectives = grouped(runs, lambda run: run.config.get("train.objective", "causal"))
    # Answers of probes are compared by accuracy.
    has_answers = any(run.last and "exact_match" in run.last.answers for run in runs)
    if len(objectives) > 1 and not has_answers:
        sentences.append(
            f"The runs have different objectives ({', '.join(objectives)}): their losses are not "
            "comparable."
        )
    return sentences


def _validation(findings: Findings, runs: Sequence[Run]) -> list[str]:
    """Warns of validation tokens that are few, or of files that are also trained on."""
    sentences = []
    if 0 < findings.setup.validation_tokens < FEW_TARGETS:
        sentences.append(
            f"The losses are means over only {findings.setup.validation_tokens:,} validation tokens. "
            "Intervals are over seeds: on other validation tokens, the order may be different."
        )
    description = runs[0].text.description if runs[0].text else {}
    for store in description.get("mixture", [description]):
        if not store.get("plain_text", {}).get("split_by_file", True):
            sentences.append(
                "The validation tokens are passages of files that are also trained on, so losses on "
                "other files may be higher. With more files, or a larger "
                "config.data.validation_fraction, whole files are held out."
            )
            break
    return sentences


def _machine(run: Run) -> str:
    """Returns the devices of a run, with the kind of processor where it is known."""
    session = run.sessions[-1]
    texts = [f"{session.devices} × {session.device}"]
    for field in _PROCESSOR_FIELDS:
        if field in session.processor:
            texts.append(f"{field} {session.processor[field]}")
    return ", ".join(texts)


def _few(names: Sequence[str], separator: str = ", ") -> str:
    """Returns "a, b, c" of up to MAX_NAMES names, else of the first, "and 3 others"."""
    hidden = len(names) - MAX_NAMES
    shown = list(names[:MAX_NAMES])
    if hidden > 0:
        shown.append(f"and {words.plural(hidden, 'other')}")
    return separator.join(shown)
