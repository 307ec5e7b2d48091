"""Tests of evaluation: scores are compared with plain arithmetic and with the `hf` backend of
lm-evaluation-harness.
"""

import functools
import json
import math
import pickle
import shutil
import sqlite3
import string
from pathlib import Path

import jax
import numpy as np
import pytest
from conftest import build, call, forward, init, spaced_model, spaced_tokenizer
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.tasks import manager

from smallgpt_jax.data import tokenizers
from smallgpt_jax.data.tokenizer_source import TokenizerSource
from smallgpt_jax.errors import UserError
from smallgpt_jax.evaluation import lm_eval_tasks, local_data
from smallgpt_jax.evaluation.lm_eval_model import SmallGPT
from smallgpt_jax.evaluation.score_cache import ScoreCache
from smallgpt_jax.evaluation.scoring import Score, Scorer, TokenSequence
from smallgpt_jax.inference import TrainedModel
from smallgpt_jax.run.workdir import ImportedModel, write_imported

CONTEXT = 32


def harness_model(model, params, tokenizer=None, progress=lambda *_: None, **settings) -> SmallGPT:
    # All rows of a batch are computed. The default, 8192, would be hundreds for a few texts.
    scorer = Scorer(model, params, **{"batch_tokens": 64, **settings})
    trained = TrainedModel(model, params, {}, tokenizer or tokenizers.Bytes(), 0)
    return SmallGPT(scorer, trained, progress)


def request(kind: str, *arguments) -> Instance:
    return Instance(request_type=kind, doc={}, arguments=arguments, idx=0)


@pytest.fixture(scope="module")
def gpt():
    """Returns a model with a context of 32 tokens, and parameters with which it prefers letters and
    spaces.
    """
    model = build("gpt", num_layers=1, context_length=CONTEXT)
    params = init(model)
    preferred_V = np.isin(np.arange(512), list(f"{string.ascii_lowercase} ".encode()))
    return model, {
        **params,
        "head": params["head"] * np.where(preferred_V, 1.0, 0.01)[:, None].astype(np.float32),
    }


def logits_of(model, params, tokens) -> np.ndarray:
    """Returns the logits after each token, (T, V) float64. Tokens are padded, so that all calls
    share one program.
    """
    padded = np.array([[*tokens, *[0] * (CONTEXT - len(tokens))]])
    return np.asarray(forward(model, params, padded)[0, : len(tokens)], np.float64)


# ---------------------------------------------------------------------- scores


@pytest.mark.slow
def test_scores_are_sums_of_log_probabilities():
    """Scores of batched sequences match log-probabilities that are computed in float64 for each
    sequence alone.
    """
    model = build(
        "cgpt", context_length=CONTEXT, num_layers=2, blocks_per_stage=1, logit_softcap=0.1
    )
    params = init(model)
    random = np.random.default_rng(0)
    sequences = [
        TokenSequence(random.integers(0, 512, n).tolist(), int(random.integers(1, n)))
        for n in [*random.integers(2, CONTEXT + 2, 40), 2, CONTEXT + 1]
    ]
    # Three more sequences: each has five random tokens, and then four tokens that the model finds
    # most likely.
    greedy = [random.integers(0, 512, 5).tolist() for _ in range(3)]
    for tokens in greedy:
        for _ in range(4):
            tokens.append(int(logits_of(model, params, tokens)[-1].argmax()))
    sequences += [TokenSequence(tokens, 4) for tokens in greedy]
    scorer = Scorer(model, params, batch_tokens=200)
    found = dict(scorer.score(sequences))
    assert sorted(found) == list(range(len(sequences)))
    for number, (tokens, scored) in enumerate(sequences):
        logits = logits_of(model, params, tokens[:-1])[-scored:]
        log_p = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        expected = log_p[np.arange(scored), tokens[-scored:]].sum()
        assert found[number].log_likelihood == pytest.approx(expected, abs=1e-3)
        assert found[number].is_greedy == (logits.argmax(axis=1) == tokens[-scored:]).all()
    assert [found[number].is_greedy for number in range(42, 45)] == [True] * 3


@pytest.mark.slow
def test_a_rolling_score_is_that_of_the_whole_text(gpt):
    """A text that is longer than the context is scored window by window; each byte is scored
    once.
    """
    text = "A text that is longer than what the model can see at once. " * 2
    (result,) = harness_model(*gpt).loglikelihood_rolling([request("loglikelihood_rolling", text)])
    tokens, expected = [256, *text.encode()], 0.0
    for start in range(1, len(tokens), CONTEXT):
        end = min(start + CONTEXT, len(tokens))
        inputs = tokens[max(0, end - 1 - CONTEXT) : end - 1]
        log_p = np.asarray(jax.nn.log_softmax(logits_of(*gpt, inputs)))
        expected += log_p[np.arange(len(inputs)), tokens[end - len(inputs) : end]][
            -(end - start) :
        ].sum()
    assert result == pytest.approx(expected, rel=1e-5)


def test_blank_and_empty_texts(gpt):
    """Empty and blank contexts become the end-of-text token. An empty continuation is refused."""
    lm = harness_model(*gpt)
    blank, empty, other = lm.loglikelihood(
        [
            request("loglikelihood", " ", "ab"),
            request("loglikelihood", "", " ab"),
            request("loglikelihood", "\n\n", "a b"),
        ]
    )
    assert blank == empty and blank[0] < -10 and other[0] < -10
    with pytest.raises(UserError, match="nothing to score"):
        lm.loglikelihood([request("loglikelihood", "question", "")])


@pytest.mark.slow
def test_generates_until_the_first_stop_string(gpt):
    """Greedy texts match token-by-token decoding up to the first stop string.

    Contexts that are too long lose their beginning. Equal requests get different samples, which
    depend on the seed.
    """
    contexts, expected = ["the cat", "a dog ran to its warm", "", "while some dog " * 40], []
    for context in contexts:
        tokens = (list(context.encode()) or [256])[-20:]
        for _ in range(12):
            tokens.append(int(logits_of(*gpt, tokens)[-1, :257].argmax()))
        expected.append(bytes(tokens[-12:]).decode())
    first, second = expected[0][3:5], expected[1][6:8]
    lm = harness_model(*gpt)
    settings = {"until": [first, second], "max_gen_toks": 12}
    texts = lm.generate_until(
        [request("generate_until", context, settings) for context in contexts]
    )
    assert texts == [text.split(first)[0].split(second)[0] for text in expected]
    sampling = {"until": [], "max_gen_toks": 12, "do_sample": True, "temperature": 1.0, "top_k": 0}
    again = [request("generate_until", "the cat", sampling)] * 4
    sampled = lm.generate_until(again)
    assert len(set(sampled)) == 4 and lm.generate_until(again) == sampled
    lm._seed = 5
    assert not set(lm.generate_until(again)) & set(sampled)
    greedy = sampling | {"temperature": 0.0}  # with do_sample=True
    assert lm.generate_until([request("generate_until", "the cat", greedy)]) == expected[:1]
    with pytest.raises(UserError, match="num_beams not supported; use do_sample, max_gen_toks"):
        lm.generate_until([request("generate_until", "a", {"until": [], "num_beams": 4})])


@pytest.mark.slow
def test_generated_texts_keep_their_leading_space():
    tokenizer = spaced_tokenizer(remove_extra_whitespaces=True)
    model, params = spaced_model(tokenizer, context_length=CONTEXT)
    contexts = ["the model is", "a cat", "on text"]
    texts = harness_model(model, params, tokenizer).generate_until(
        [
            request("generate_until", context, {"until": [], "max_gen_toks": 3})
            for context in contexts
        ]
    )
    for context, text in zip(contexts, texts):
        ids = [tokenizer.begin_of_text, *tokenizer.encode([context])[0].tolist()]
        for _ in range(3):
            ids.append(int(logits_of(model, params, ids)[-1, : tokenizer.vocab_size].argmax()))
        assert context + text == tokenizer.decode(ids[1:])
    assert all(text.startswith(" ") for text in texts), (
        "the test needs weights that generate a leading space"
    )


# ---------------------------------------------------------------------- tasks


@pytest.fixture(scope="module")
def questions(tmp_path_factory) -> Path:
    """Returns a folder of small files in the formats of the benchmarks.

    Each task has eight examples, one of which is long.
    """
    folder, words = (
        tmp_path_factory.mktemp("questions"),
        "cup shelf lamp chair door plant stone boat".split(),
    )
    rows = {name: [] for name in ("copa_val", "piqa_valid", "hellaswag_val", "lambada_openai_test")}
    for i, word in enumerate(words):
        other, third = words[(i + 1) % 8], words[(i + 3) % 8]
        long = f"It was the {third} of a friend. " * (5 if i == 2 else 0)
        rows["copa_val"].append(
            {
                "premise": f"{long}The {word} fell on the {other}.",
                "choice1": f"The {other} broke.",
                "label": i % 2,
                "choice2": f"Somebody had moved the {third}.",
                "question": ("cause", "effect")[i // 2 % 2],
                "idx": i,
            }
        )
        rows["piqa_valid"].append(
            {
                "goal": f"{long}How do I clean a {word}?",
                "sol1": f"Use a wet cloth, not a {other}.",
                "sol2": "Burn it.",
            }
        )
        rows["hellaswag_val"].append(
            {
                "query": f"Painting a {word}: A man has a brush. {long}He",
                "label": i % 4,
                "endings": [
                    f"paints the {word}.",
                    f"eats the {other}.",
                    "sleeps.",
                    f"throws the {third} into a lake.",
                ],
            }
        )
        rows["lambada_openai_test"].append(
            {"text": f"She had lost a {word} and looked for the {word}"}
        )
    for name, lines in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    (folder / "piqa_valid-labels.lst").write_text("0\n" * 8)
    (folder / "wikitext2_valid.txt").write_text(
        "".join(
            f" \n = {word.title()} = \n \n The {word} is a thing . It has a history of {i} years "
            ". \n"
            for i, word in enumerate(words)
        )
    )
    return folder


class Uniform(SmallGPT):
    """A model that gives all tokens the same probability."""

    def __init__(self):
        model = build("gpt")
        trained = TrainedModel(model, init(model), {}, tokenizers.Bytes(), 0)
        super().__init__(Scorer(model, trained.params), trained, lambda *_: None)

    def _score(self, kind, keys, jobs):
        return [Score(-math.log(257) * sum(part.scored for part in parts), False) for parts in jobs]


@pytest.mark.slow
def test_a_uniform_model_prefers_short_options(shared_data):
    """The accuracies on the first 50 questions of five tasks match those computed from the tasks'
    files.

    Longer options are less likely, so acc chooses the shortest option, or the first of several.
    acc_norm chooses the option with the fewest bytes per character. The space before an option
    counts as a byte.
    """
    data, count = shared_data / "eval", 50
    tasks = ["winogrande", "commonsense_qa", "piqa", "copa", "arc_easy"]
    results = lm_eval_tasks.evaluate(
        Uniform, tasks, data, limit=count, log_samples=False, bootstrap_iters=0
    )
    assert {name: n["effective"] for name, n in results["n-samples"].items()} == dict.fromkeys(
        tasks, count
    )
    acc, acc_norm, bits, margin = (
        {name: values.get(f"{metric},none") for name, values in results["results"].items()}
        for metric in ("acc", "acc_norm", "answer_bits_per_byte", "answer_margin")
    )
    assert bits == pytest.approx(dict.fromkeys(tasks, math.log2(257)))
    assert margin == pytest.approx(dict.fromkeys(tasks, 0.0), abs=1e-9)
    assert "samples" not in results

    def rows(name):
        return [json.loads(line) for line in (data / name).read_text().splitlines()[:count]]

    def share(options_and_answers, score=lambda option: -len(option.encode())):
        return pytest.approx(
            np.mean(
                [
                    int(np.argmax([score(option) for option in options])) == answer
                    for options, answer in options_and_answers
                ]
            )
        )

    def score_per_character(option):
        return -math.log(257) * len(f" {option}".encode()) / len(option)

    assert acc["winogrande"] == np.mean(
        [row["answer"] == "1" for row in rows("winogrande_xl_dev.jsonl")]
    )
    assert acc["commonsense_qa"] == np.mean(
        [row["answerKey"] == "A" for row in rows("commonsense_qa_dev.jsonl")]
    )
    labels = [int(label) for label in (data / "piqa_valid-labels.lst").read_text().split()]
    piqa = [
        ((row["sol1"], row["sol2"]), label) for row, label in zip(rows("piqa_valid.jsonl"), labels)
    ]
    assert acc["piqa"] == share(piqa) and acc_norm["piqa"] == share(piqa, score_per_character)
    assert acc["copa"] == share(
        ((row["choice1"], row["choice2"]), row["label"]) for row in rows("copa_val.jsonl")
    )
    assert acc["arc_easy"] == share(
        (
            [choice["text"] for choice in row["question"]["choices"]],
            [choice["label"] for choice in row["question"]["choices"]].index(row["answerKey"]),
        )
        for row in rows("arc_easy_dev.jsonl")
    )


@pytest.mark.slow
def test_the_hf_backend_gives_the_same_scores(questions, tmp_path):
    """An lgpt and its export in PyTorch give each option the same score.

    Some questions are longer than the context.
    """
    pytest.importorskip("torch")
    huggingface = pytest.importorskip("lm_eval.models.huggingface")
    from smallgpt_jax.conversion import hugging_face

    texts = [path.read_text() for path in (Path(json.__file__).parent).glob("*.py")]
    tokenizer = TokenizerSource("sentencepiece:400").make(texts)
    model = build("lgpt", num_layers=2, blocks_per_stage=1, context_length=CONTEXT)
    params = init(model)
    hugging_face.export_folder(tmp_path, model, params, tokenizer)
    ours, theirs = (
        lm_eval_tasks.evaluate(
            make,
            ["hellaswag", "piqa", "lambada_openai"],
            questions,
            log_samples=True,
            bootstrap_iters=0,
        )
        for make in (
            lambda: harness_model(model, params, tokenizer, devices=jax.devices()[:1]),
            lambda: huggingface.HFLM(
                pretrained=str(tmp_path),
                trust_remote_code=True,
                batch_size=16,
                device="cpu",
                dtype="float32",
            ),
        )
    )
    perplexity, other = (
        result["results"]["lambada_openai"]["perplexity,none"] for result in (ours, theirs)
    )
    assert perplexity == pytest.approx(other, rel=1e-3) and perplexity > 1
    for task, options in (("hellaswag", 4), ("piqa", 2)):
        one, other = (
            np.array(
                [[score for ((score, _),) in sample["resps"]] for sample in result["samples"][task]]
            )
            for result in (ours, theirs)
        )
        assert one.shape == (8, options)
        np.testing.assert_allclose(one, other, atol=1e-3, rtol=1e-5)
        values, others = ours["results"][task], theirs["results"][task]
        assert values.keys() == others.keys()
        for key, value in values.items():
            # those of answers follow from log-likelihoods, which round differently
            if key.startswith("answer_"):
                assert value == pytest.approx(others[key], abs=1e-3)
            else:
                assert value == others[key]
        right = [i % 4 for i in range(8)] if task == "hellaswag" else [0] * 8
        texts = [
            [arguments[1] for arguments in sample["arguments"]] for sample in ours["samples"][task]
        ]
        lengths = np.array([[len(text.encode()) for text in row] for row in texts])
        bits = -one / lengths * np.log2(np.e)
        is_right = np.arange(options) == np.array(right)[:, None]
        margins = np.where(is_right, np.inf, bits).min(axis=1) - bits[is_right]
        assert values["answer_bits_per_byte,none"] == pytest.approx(bits[is_right].mean())
        assert values["answer_margin,none"] == pytest.approx(margins.mean())
        error = np.std(margins, ddof=1) / np.sqrt(8)
        assert values["answer_margin_stderr,none"] == pytest.approx(error)


@pytest.mark.slow
def test_an_interrupted_evaluation_resumes(gpt, questions, tmp_path):
    counts = []

    class Interrupted(Exception):
        pass

    scores = tmp_path / "scores.jsonl"

    def evaluate(limit=math.inf, cache=scores):
        done = []

        def progress(what, number, total):
            done.append(number)
            if len(done) >= limit:
                raise Interrupted

        try:
            return lm_eval_tasks.evaluate(
                lambda: harness_model(
                    *gpt, progress=progress, batch_tokens=256, devices=jax.devices()[:1]
                ),
                ["copa", "piqa"],
                questions,
                cache=cache,
                log_samples=False,
                bootstrap_iters=0,
            )
        except Interrupted:
            return None
        finally:
            counts.append(len(done))

    assert evaluate(12) is None
    interrupted = evaluate()
    assert counts == [12, 2 * 8 + 2 * 8 - 12]
    assert evaluate(cache=None)["results"] == interrupted["results"]

    # Damaged lines are computed again: of 32, one is no JSON, one has a wrong result, one is cut.
    lines = scores.read_bytes().splitlines(keepends=True)
    lines[0], lines[1], lines[-1] = b"\xff\n", lines[1].replace(b"result", b"x"), lines[-1][:50]
    scores.write_bytes(b"".join(lines))
    assert evaluate()["results"] == interrupted["results"] and counts[-1] == 3
    assert evaluate()["results"] == interrupted["results"] and counts[-1] == 0


class ShortestIsBest(LM):
    """All bytes have equal probability."""

    def loglikelihood(self, requests):
        return [(-float(len(request.args[1])), False) for request in requests]

    loglikelihood_rolling = generate_until = None


def test_babylm_counts_each_file_equally(tmp_path):
    pairs = {
        "blimp_filtered/a": [("ab", "abc"), ("abc", "ab"), ("abcd", "ab"), ("abc", "a")],
        "blimp_filtered/b": [("a", "abc"), ("a", "ab")],
        "supplement_filtered/c": [("abcd", "a"), ("ab", "abc")],
    }
    for name, rows in pairs.items():
        path = tmp_path / f"{name}.jsonl"
        path.parent.mkdir(exist_ok=True)
        rows = [{"sentence_good": good, "sentence_bad": bad} for good, bad in rows]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    results = lm_eval_tasks.evaluate(ShortestIsBest, ["babylm"], tmp_path)["results"]
    accuracies = {name: values["acc,none"] for name, values in results.items()}
    assert accuracies == {
        "babylm_blimp": (1 / 4 + 1) / 2,
        "babylm_supplement": 1 / 2,
        "babylm_blimp_a": 1 / 4,
        "babylm_blimp_b": 1,
        "babylm_supplement_c": 1 / 2,
    }
    errors = [results[f"babylm_blimp_{name}"]["acc_stderr,none"] for name in "ab"]
    assert results["babylm_blimp"]["acc_stderr,none"] == pytest.approx(math.hypot(*errors) / 2)
    bits = results["babylm_supplement"]["answer_bits_per_byte,none"]
    assert bits == pytest.approx(1 / math.log(2))
    single = lm_eval_tasks.evaluate(ShortestIsBest, ["babylm"], tmp_path, limit=1)["results"]
    json.dumps(single, allow_nan=False)
    errors = [single[name]["acc_stderr,none"] for name in ("babylm_blimp", "babylm_blimp_a")]
    assert errors == ["N/A", "N/A"] and single["babylm_blimp"]["acc,none"] == 1

    (tmp_path / "blimp_filtered" / "b.jsonl").write_text('{"sentence_good": "a"}\n')
    for folder, message in (
        (None, "--tasks=babylm: needs --data_dir"),
        (tmp_path / "blimp_filtered", "missing blimp_filtered/"),
        (tmp_path, "b.jsonl: expected JSON lines with sentence_good and sentence_bad"),
    ):
        with pytest.raises(UserError, match=message):
            lm_eval_tasks.evaluate(ShortestIsBest, ["babylm"], folder)
    pairs = (
        '{"sentence_good": "a", "sentence_bad": "b"}\n\n{"sentence_good": "a", "sentence_bad": "a"}'
    )
    (tmp_path / "blimp_filtered" / "b.jsonl").write_text(pairs)
    with pytest.raises(UserError, match=r"b\.jsonl, line 3: sentence_good and .* are equal"):
        lm_eval_tasks.evaluate(ShortestIsBest, ["babylm"], tmp_path)


class Writes:
    """Its pickle writes a file."""

    def __init__(self, path):
        self._path = path

    def __reduce__(self):
        return (Path.touch, (self._path,))


@pytest.fixture(scope="module")
def imported(gpt, tmp_path_factory) -> Path:
    """Returns a workdir of `gpt`. Tests must not change it."""
    workdir = tmp_path_factory.mktemp("imported") / "run"
    write_imported(workdir, ImportedModel(*gpt, tokenizers.Bytes()), {})
    return workdir


@pytest.mark.slow
def test_no_pickle_in_a_workdir_is_executed(imported, questions, tmp_path):
    """Somebody else has written to the files that `evaluate` left in the workdir."""
    run, written = tmp_path / "run", tmp_path / "written"
    shutil.copytree(imported, run)
    poison = pickle.dumps(Writes(written))
    pickle.loads(poison)
    assert written.exists()
    written.unlink()
    other_questions = shutil.copytree(questions, tmp_path / "other")
    for folder in (questions, other_questions):
        result = call(
            "evaluate",
            f"--workdir={run}",
            "--tasks=copa",
            f"--data_dir={folder}",
            "--batch_tokens=64",
        )
        assert result.returncode == 0 and not written.exists(), result.stderr
        results = list((run / "evaluations").glob("step*-copa-*.json"))
        assert len(results) == (1 if folder is questions else 2)  # one per folder
        for path in (run / "evaluations").iterdir():
            if path.read_bytes().startswith(b"SQLite format 3"):
                with sqlite3.connect(path) as database:
                    database.execute("update unnamed set value = ?", (poison,))
            else:
                path.write_bytes(poison)


def test_scores_are_kept_by_request(tmp_path):
    """Requests that differ in their kind or arguments have other results, also in a new process."""
    settings = {"until": ["\n"], "temperature": 0.0}
    results = [
        ("loglikelihood", ("a", "b"), (-2.5, True)),
        ("loglikelihood_rolling", ("a",), -math.inf),
        ("loglikelihood_rolling", ("b",), -0.1),
        ("generate_until", ("a cup", settings), "of tea\u2028\ud800\n"),
    ]
    cache = ScoreCache(tmp_path / "scores.jsonl")
    for kind, arguments, result in results:
        cache.add_partial(kind, arguments, result)
    again = ScoreCache(tmp_path / "scores.jsonl")
    for kind, arguments, result in results:
        assert again.find(kind, arguments) == result
    assert again.find("loglikelihood", ("ab", "")) is None
    assert again.find("generate_until", ("a cup", {"until": ["\n"]})) is None


@pytest.mark.slow
def test_only_texts_that_are_not_sampled_are_kept(gpt, tmp_path):
    requests = [
        request("generate_until", "a cup", {"until": [], "max_gen_toks": 4, "temperature": heat})
        for heat in (0.0, 1.0)
    ]
    done = []
    harness = harness_model(*gpt, progress=lambda what, number, total: done.append(total))
    texts = []
    for _ in range(2):
        harness.set_cache_hook(ScoreCache(tmp_path / "scores.jsonl"))
        texts.append(harness.generate_until(requests))
    assert texts[0] == texts[1] and done == [2, 2, 1]
    (line,) = (tmp_path / "scores.jsonl").read_text().splitlines()
    assert json.loads(line)["result"] == texts[0][0]


# ---------------------------------------------------------------------- refusals


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags, message",
    [
        (["--data_dir=/none"], "--data_dir=/none: no such folder"),
        (["--paths=best", "--data_dir=DATA"], "only pgpt has paths"),
        (["--limit=0", "--data_dir=DATA"], "--limit=0: must be a finite number above 0"),
        (
            ["--gen_kwargs=temperature=1", "--data_dir=DATA"],
            "--gen_kwargs: none of these tasks generates text; omit it",
        ),
        (
            ["--num_fewshot=8", "--data_dir=DATA"],
            "--num_fewshot=8: a task has fewer examples to choose",
        ),
    ],
)
def test_refuses_wrong_flags(flags, message, imported, questions):
    flags = [flag.replace("DATA", str(questions)) for flag in flags]
    result = call("evaluate", f"--workdir={imported}", "--tasks=piqa", *flags)
    *_, last = result.stderr.splitlines()  # a progress bar may precede the last line
    assert result.returncode == 1 and last.startswith("error: ") and message in last, result.stderr


QUESTION = '{"question": {"stem": "?", "choices": [{"label": "A", "text": "a"}]}, "answerKey": "A"}'
WINOGRANDE = '{"sentence": "a _", "option1": "b", "option2": "c", "answer": "1"}'
EXAMPLE_ROWS = {
    "hellaswag": '{"query": "?", "endings": ["a"], "label": 1}',
    "winogrande": WINOGRANDE + "\n" + WINOGRANDE.replace('"1"}', '""}'),
    "commonsense_qa": QUESTION,
    "arc_easy": QUESTION.replace('"answerKey": "A"', '"answerKey": "B"'),
    "lambada_openai": '{"text": "word"}',
}
task_manager = functools.cache(
    lm_eval_tasks.task_manager
)  # cached, since it reads the descriptions of tasks


@pytest.mark.parametrize(
    "tasks, message",
    [
        (["bolq"], "no task 'bolq'; did you mean boolq"),
        (
            ["paper"],
            r"missing anli_v1\.0/R1/test\.jsonl \(anli_r1, https://.*\), piqa_valid\.jsonl \(piqa, https://.*\), "
            r"piqa_valid-labels\.lst \(piqa, https://.*\); add",
        ),
        (["winogrande"], r'winogrande_xl_dev\.jsonl: .*line 2: answer: expected "1" or "2"'),
        (["lambada_openai"], r"lambada_openai_test\.jsonl: .*line 1: .*a text of several words"),
        (["hellaswag"], r"hellaswag_val\.jsonl: .*line 1: label 1 of 1 endings"),
        (["arc_easy"], r"arc_easy_dev\.jsonl: .*line 1: no choice 'B'"),
        (["copa"], r"copa_val\.jsonl: not the data of copa \(ValueError: line 1: not JSON"),
        (["boolq", "copa"], "--data_dir: does not support boolq, only hellaswag, "),
        ([], "--tasks: is empty"),
    ],
)
def test_refuses_wrong_tasks_before_anything_is_computed(tasks, message, tmp_path, monkeypatch):
    def never():
        raise AssertionError

    # Of the harness's own tasks, those of one folder: it reads the descriptions of all for ten
    # seconds.
    monkeypatch.setattr(
        manager, "__file__", str(Path(manager.__file__).parent / "super_glue" / "manager.py")
    )
    monkeypatch.setattr(
        lm_eval_tasks,
        "task_manager",
        lambda names: task_manager(
            ("all",) if not set(names) <= lm_eval_tasks.FOLDERS.keys() else tuple(names)
        ),
    )
    for name, task in local_data.TASKS.items():
        if name not in ("anli_r1", "piqa"):
            for file in task.files:
                (tmp_path / file).write_text("{" if name == "copa" else EXAMPLE_ROWS.get(name, ""))
    with pytest.raises(UserError, match=message):
        lm_eval_tasks.evaluate(never, tasks, tmp_path)


def test_texts_that_the_tokenizer_cannot_encode(gpt):
    """Their likelihood is not that of the text, so bits per byte are left out."""
    from smallgpt_jax.evaluation import benchmarks

    tokenizer = spaced_tokenizer(remove_extra_whitespaces=False)
    lm = harness_model(*gpt, tokenizer)
    texts = ["the cat", "the Ω", "a model"]
    lm.loglikelihood_rolling([request("loglikelihood_rolling", text) for text in texts])
    assert lm.unencoded == 1
    results = {"results": {"wikitext": {"bits_per_byte,none": 1.5, "acc,none": 0.5}}}
    benchmarks.leave_out(benchmarks.PER_TEXT, results)
    assert results == {"results": {"wikitext": {"bits_per_byte,none": None, "acc,none": 0.5}}}
