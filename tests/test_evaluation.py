"""Evaluation: log-likelihoods against plain arithmetic and against the harness's own `hf` backend."""

import functools
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import build, forward, init, load_config, run, spaced_model, spaced_tokenizer
from lm_eval.api.instance import Instance

from smallgpt_jax import inference
from smallgpt_jax.data import tokenizers
from smallgpt_jax.errors import UserError
from smallgpt_jax.evaluation import local_data, report
from smallgpt_jax.evaluation import run as evaluation
from smallgpt_jax.evaluation.harness import SmallGPT
from smallgpt_jax.evaluation.scoring import Score, Scorer, TokenSequence, static_lengths, windows
from smallgpt_jax.train import train

EXAMPLES = {"hellaswag": 10042, "winogrande": 1267, "commonsense_qa": 1221, "piqa": 1838, "copa": 100,
            "arc_easy": 570, "lambada_openai": 5153, "wikitext": 60}


QUESTION = '{"question": {"stem": "?", "choices": [{"label": "A", "text": "a"}]}, "answerKey": "A"}'
EXAMPLE_ROWS = {"hellaswag": '{"query": "?", "endings": ["a"], "label": 0}', "winogrande": "{}",
                "commonsense_qa": QUESTION}


def harness_model(model, params, tokenizer=None, told=None, **settings) -> SmallGPT:
    return SmallGPT(Scorer(model, params, **settings), params, tokenizer or tokenizers.Bytes(),
                    told or (lambda *_: None))


def request(kind: str, *arguments) -> Instance:
    return Instance(request_type=kind, doc={}, arguments=arguments, idx=0)


# ---------------------------------------------------------------------- scores

@pytest.mark.parametrize("devices", [1, 8])
@pytest.mark.parametrize("architecture", ["gpt", "cgpt"])
def test_scores_are_sums_of_log_probabilities(architecture, devices):
    """Of sequences of all lengths, against the logits of each alone in float64."""
    model = build(architecture)
    params = init(model)

    @jax.jit
    def all_logits(tokens_T):
        return model.apply({"params": params}, tokens_T[None])[0]

    def logits_of(tokens) -> np.ndarray:
        return np.asarray(all_logits(jnp.array(tokens + [0] * (64 - len(tokens)))), np.float64)[:len(tokens)]

    random = np.random.default_rng(0)
    sequences = [TokenSequence(random.integers(0, 512, n).tolist(), int(random.integers(1, n)))
                 for n in [*random.integers(2, 66, 40), 2, 65]]
    # Of these the likeliest tokens are asked for.
    greedy = [random.integers(0, 512, 5).tolist() for _ in range(3)]
    for tokens in greedy:
        for _ in range(4):
            tokens.append(int(logits_of(tokens)[-1].argmax()))
    sequences += [TokenSequence(tokens, 4) for tokens in greedy]
    scorer = Scorer(model, params, batch_tokens=200, devices=jax.devices()[:devices])
    found = dict(scorer.score(sequences))
    assert sorted(found) == list(range(len(sequences)))
    for number, (tokens, scored) in enumerate(sequences):
        logits = logits_of(list(tokens[:-1]))[-scored:]
        log_p = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        expected = log_p[np.arange(scored), tokens[-scored:]].sum()
        assert found[number].log_likelihood == pytest.approx(expected, abs=1e-3)
        assert found[number].is_greedy == (logits.argmax(axis=1) == tokens[-scored:]).all()
    assert [found[number].is_greedy for number in range(42, 45)] == [True] * 3


def test_windows_score_each_token_once_with_all_the_context_there_is():
    """The harness's own example: ten tokens behind a mark, a context of four."""
    tokens = ["BOS", *range(10)]
    assert windows(tokens, 1, 4) == [(["BOS", 0, 1, 2, 3], 4), ([3, 4, 5, 6, 7], 4), ([5, 6, 7, 8, 9], 2)]
    assert windows(tokens, 9, 4) == [([5, 6, 7, 8, 9], 2)]  # a long question loses its beginning
    assert windows(tokens, 9, 40) == [(tokens, 2)]
    assert windows(tokens, 11, 4) == []


def test_static_lengths_are_few_and_fit():
    needed = np.random.default_rng(0).geometric(0.02, 5000).clip(1, 1000)
    lengths = static_lengths(needed, 1024)
    assert len(lengths) <= 6 and lengths == sorted(set(lengths)) and lengths[-1] >= needed.max()
    filled = np.array(lengths)[np.searchsorted(lengths, needed)]
    assert needed.sum() / filled.sum() > 0.7
    even = np.linspace(needed.max() / 6, needed.max(), 6)  # the same number, at equal distances
    assert filled.sum() < 0.8 * even[np.searchsorted(even, needed)].sum()
    assert static_lengths([3, 20, 20, 64], 64) == [16, 32, 64]
    assert static_lengths([70], 70) == [70] and static_lengths([], 64) == []


def test_a_rolling_score_is_that_of_the_whole_text():
    """A text of three contexts, window by window, each byte once."""
    model = build("gpt")
    params = init(model)
    text = "A text that is longer than what the model can see at once. " * 3
    result, = harness_model(model, params).loglikelihood_rolling([request("loglikelihood_rolling", text)])
    tokens, expected = [256, *text.encode()], 0.0
    for start in range(1, len(tokens), 64):
        end = min(start + 64, len(tokens))
        inputs = tokens[max(0, end - 65):end - 1]
        log_p = np.asarray(jax.nn.log_softmax(forward(model, params, jnp.array([inputs]))[0]))
        expected += log_p[np.arange(len(inputs)), tokens[end - len(inputs):end]][-(end - start):].sum()
    assert result == pytest.approx(expected, rel=1e-5)


def test_texts_are_written_to_the_first_stop_string(trained):
    """Token by token what the model finds likeliest; contexts that are too long lose their beginning."""
    model, params, _, tokenizer, _ = inference.load_trained(trained)
    lm = harness_model(model, params, tokenizer)
    settings = {"until": ["house", "q"], "max_gen_toks": 20}
    contexts = ["the cat", "a dog ran to its warm", "", "while some dog " * 40]
    written = lm.generate_until([request("generate_until", context, settings) for context in contexts])
    apply = functools.partial(forward, model, params)
    for context, text in zip(contexts, written):
        tokens, expected = (list(context.encode()) or [256])[-236:], ""
        for _ in range(20):
            padded = np.zeros((1, 256), int)
            padded[0, :len(tokens)] = tokens
            logits = apply(padded)[0, len(tokens) - 1, :257]
            tokens.append(int(logits.argmax()))
            expected += chr(tokens[-1])
        assert text == expected.split("house")[0].split("q")[0]
    drawing = {"until": [], "max_gen_toks": 20, "do_sample": True, "temperature": 1.0, "top_k": 0}
    again = [request("generate_until", "the cat", drawing)] * 3
    drawn = lm.generate_until(again)
    assert len(set(drawn)) == 3 and lm.generate_until(again) == drawn
    lm._seed = 5
    assert not set(lm.generate_until(again)) & set(drawn)
    with pytest.raises(UserError, match="knows no num_beams; it knows do_sample, max_gen_toks"):
        lm.generate_until([request("generate_until", "a", {"until": [], "num_beams": 4})])


def test_written_texts_keep_the_space_that_they_begin_with():
    tokenizer = spaced_tokenizer(remove_extra_whitespaces=True)
    model, params = spaced_model(tokenizer)
    contexts = ["the model is", "a cat", "on text"]
    written = harness_model(model, params, tokenizer).generate_until(
        [request("generate_until", context, {"until": [], "max_gen_toks": 3}) for context in contexts])
    for context, text in zip(contexts, written):
        ids = tokenizer.encode([context])[0].tolist()
        for _ in range(3):
            logits = forward(model, params, np.array([ids + [0] * (64 - len(ids))]))[0, len(ids) - 1]
            ids.append(int(logits[:tokenizer.vocab_size].argmax()))
        assert context + text == tokenizer.decode(ids)
    assert all(text.startswith(" ") for text in written), "these weights do not show the difference"


def test_blank_and_empty_texts():
    """After nothing, and after nothing but spaces, comes what begins a document; an empty answer has no score."""
    model = build("gpt")
    lm = harness_model(model, init(model))
    blank, empty, whole = lm.loglikelihood([
        request("loglikelihood", " ", "ab"), request("loglikelihood", "", " ab"),
        request("loglikelihood", "\n\n", "a b")])
    assert blank == empty and blank[0] < -10 and whole[0] < -10
    with pytest.raises(UserError, match="there is nothing to score"):
        lm.loglikelihood([request("loglikelihood", "question", "")])


def test_the_table_of_a_group():
    """Of which the harness says no number of examples."""
    results = {"results": {"mmlu": {"alias": "mmlu", "acc,none": 0.25, "acc_stderr,none": 0.01},
                           "copa": {"alias": "copa", "sample_len": 100, "acc,none": 0.5, "acc_stderr,none": "N/A"}},
               "n-shot": {"copa": 0}}
    lines = report.table(results, "lgpt").splitlines()
    assert lines[2] == "| mmlu |  |  | acc | 0.2500 ± 0.0100 |  |  |"
    assert lines[3] == "| copa | 100 | 0 | acc | 0.5000 | 0.5000 | 0.5200 |"


# ---------------------------------------------------------------------- tasks

@pytest.fixture(scope="module")
def eval_data(shared_data):
    return shared_data / "eval"


@pytest.fixture(scope="module")
def trained(tmp_path_factory, text_file):
    folder = tmp_path_factory.mktemp("trained") / "run"
    train(load_config("gpt", data__source=str(text_file), model__context_length=256, train__steps=60),
          str(folder))
    return folder


def test_local_files_have_the_right_number_of_examples(eval_data):
    for name, count in EXAMPLES.items():
        task = local_data.TASKS[name]
        assert len(task.rows(*((eval_data / file).read_text() for file in task.files))) == count


def test_anli_and_full_hellaswag_files(tmp_path):
    row = {"uid": "1", "context": "A.", "hypothesis": "B.", "label": "n", "reason": ""}
    assert local_data.anli(json.dumps(row)) == [{"premise": "A.", "hypothesis": "B.", "label": 1}]
    row = {"activity_label": "Baking", "ctx_a": "A cake [title] is", "ctx_b": "she", "label": 2,
           "endings": ["a [step] b.", "c.", "d.", "e."]}
    assert local_data.hellaswag(json.dumps(row)) == [
        {"query": "Baking: A cake. is She", "choices": ["a b.", "c.", "d.", "e."], "label": 2}]


class Uniform(SmallGPT):
    """Finds all tokens equally likely."""

    def __init__(self):
        model = build("gpt")
        super().__init__(Scorer(model, init(model)), None, tokenizers.Bytes(), lambda *_: None)

    def _score(self, kind, keys, jobs):
        return [Score(-math.log(257) * sum(part.scored for part in parts), False) for parts in jobs]


@pytest.mark.slow
def test_a_uniform_model_scores_what_it_should(eval_data):
    """All questions of five tasks: chance, within a standard error, where options are equally long; else how
    often the shorter option is right (counted from the files; of equals the first), and by acc_norm the one with
    the fewest bytes per character, of which bytes the space in front is one."""
    tasks = ["winogrande", "commonsense_qa", "piqa", "copa", "arc_easy"]
    results = evaluation.evaluate(Uniform, tasks, eval_data, log_samples=False, bootstrap_iters=0)
    assert {name: n["effective"] for name, n in results["n-samples"].items()} == {
        name: EXAMPLES[name] for name in tasks}
    found, normalized = ({name: values.get(metric) for name, values in results["results"].items()}
                         for metric in ("acc,none", "acc_norm,none"))
    for name in ("winogrande", "commonsense_qa"):
        chance = report.CHANCE[name]
        assert abs(found[name] - chance) < math.sqrt(chance * (1 - chance) / EXAMPLES[name])

    def rows(name):
        return [json.loads(line) for line in (eval_data / name).read_text().splitlines()]

    def share(options_and_answers, score=lambda option: -len(option.encode())):
        return np.mean([int(np.argmax([score(option) for option in options])) == answer
                        for options, answer in options_and_answers])

    def score_per_character(option):
        return -math.log(257) * len(f" {option}".encode()) / len(option)

    labels = [int(label) for label in (eval_data / "piqa_valid-labels.lst").read_text().split()]
    piqa = [((row["sol1"], row["sol2"]), label) for row, label in zip(rows("piqa_valid.jsonl"), labels)]
    assert found["piqa"] == pytest.approx(share(piqa))
    assert normalized["piqa"] == pytest.approx(share(piqa, score_per_character))
    assert found["copa"] == pytest.approx(share(
        ((row["choice1"], row["choice2"]), row["label"]) for row in rows("copa_val.jsonl")))
    assert found["arc_easy"] == pytest.approx(share(
        ([choice["text"] for choice in row["question"]["choices"]],
         [choice["label"] for choice in row["question"]["choices"]].index(row["answerKey"]))
        for row in rows("arc_easy_dev.jsonl")))


@pytest.mark.slow
def test_the_hf_backend_finds_the_same(eval_data, tmp_path):
    """The harness's own PyTorch backend on an exported gpt and lgpt: 200 questions of HellaSwag and PIQA each,
    option by option."""
    pytest.importorskip("torch")
    huggingface = pytest.importorskip("lm_eval.models.huggingface")
    from smallgpt_jax.conversion import hugging_face

    for architecture in ("gpt", "lgpt"):
        folder = tmp_path / architecture
        train(load_config(
            architecture, data__source=str(eval_data.parent / "text/tinyshakespeare.txt"), train__steps=40,
            data__tokenizer="sentencepiece:512", model__context_length=512), str(folder / "run"))
        model, params, _, tokenizer, _ = inference.load_trained(folder / "run")
        (folder / "hf").mkdir()
        hugging_face.export(folder / "hf", model, params, tokenizer, "")
        ours, theirs = (evaluation.evaluate(
            make, ["hellaswag", "piqa"], eval_data, limit=200, log_samples=True, bootstrap_iters=0)
            for make in (lambda: harness_model(model, params, tokenizer),
                         lambda: huggingface.HFLM(pretrained=str(folder / "hf"), trust_remote_code=True,
                                                  batch_size=16, device="cpu", dtype="float32")))
        for task in ("hellaswag", "piqa"):
            one, other = (np.array([[score for (score, _), in sample["resps"]]
                                    for sample in result["samples"][task]]) for result in (ours, theirs))
            assert one.shape == (200, 4 if task == "hellaswag" else 2)
            np.testing.assert_allclose(one, other, atol=1e-3, rtol=1e-5)
            assert ours["results"][task] == theirs["results"][task]


def test_an_interrupted_evaluation_goes_on(trained, eval_data, tmp_path):
    model, params, _, tokenizer, _ = inference.load_trained(trained)
    counts = []

    class Interrupted(Exception):
        pass

    def evaluate(most):
        done = []

        def told(what, number, total):
            done.append(number)
            if len(done) >= most:
                raise Interrupted

        try:
            return evaluation.evaluate(
                lambda: harness_model(model, params, tokenizer, told, batch_tokens=2048), ["copa", "piqa"],
                eval_data, cache=tmp_path / "cache", limit=40, log_samples=False, bootstrap_iters=0)
        except Interrupted:
            return None
        finally:
            counts.append(len(done))

    assert evaluate(30) is None
    interrupted = evaluate(10**9)
    assert evaluate(10**9)["results"] == interrupted["results"]
    total = 2 * 40 + 2 * 40
    assert counts[0] == 30 and counts[1] == total - 30 and counts[2] == 0
    alone = evaluation.evaluate(lambda: harness_model(model, params, tokenizer), ["copa", "piqa"], eval_data,
                                limit=40, log_samples=False, bootstrap_iters=0)
    assert alone["results"] == interrupted["results"]


def test_the_command(trained, eval_data):
    """Few-shot, limits; a table and the harness's JSON."""
    result = run("evaluate", f"--workdir={trained}", "--tasks=copa,lambada_openai,wikitext",
                 f"--data_dir={eval_data}", "--num_fewshot=1", "--limit=6")
    assert result.returncode == 0, result.stderr
    assert not [line for line in result.stderr.splitlines() if "left" not in line], result.stderr
    assert "| copa | 6 | 1 | acc |" in result.stdout and "| 0.5000 | 0.5100 |" in result.stdout
    assert "| wikitext | 6 | 1 | bits_per_byte |" in result.stdout and "whole vocabulary" in result.stdout
    name = "step60-copa_lambada_openai_wikitext-1shot-limit6"
    results = json.loads((trained / "evaluations" / f"{name}.json").read_text())
    assert results["results"]["lambada_openai"]["perplexity,none"] > 1 and results["n-shot"]["copa"] == 1
    assert (trained / "evaluations" / f"{name}.md").read_text() in result.stdout


@pytest.mark.parametrize("flags, words", [
    (["--tasks=piqa", "--data_dir=/none"], ["--data_dir=/none: there is no such folder"]),
    (["--tasks=piqa", "--paths=best", "--data_dir=DATA"], ["only pgpt has paths"]),
    (["--tasks=piqa"], ["the data of 'piqa' could not be loaded", "--data_dir"]),
])
def test_bad_flags(flags, words, trained, eval_data, tmp_path):
    flags = [flag.replace("DATA", str(eval_data)) for flag in flags]
    result = run("evaluate", f"--workdir={trained}", *flags, HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path))
    assert result.returncode == 1 and result.stderr.count("\n") <= 2, result.stderr
    assert result.stderr.startswith("error: ") and all(word in result.stderr for word in words), result.stderr


@pytest.mark.parametrize("tasks, message", [
    (["wingrande"], "no task 'wingrande'; the nearest: winogrande"),
    (["paper"], r"missing anli_v1\.0/R1/test\.jsonl \(anli_r1, https://.*\), piqa_valid\.jsonl \(piqa, https://.*\), "
                r"piqa_valid-labels\.lst \(piqa, https://.*\); put"),
    (["copa"], r"copa_val\.jsonl: not the file of copa \(JSONDecodeError"),
    (["mmlu", "copa"], "--data_dir: cannot be used for mmlu, only for hellaswag, "),
    ([], "--tasks is empty"),
])
def test_bad_tasks_are_told_before_anything_is_computed(tasks, message, tmp_path):
    def never():
        raise AssertionError

    for name, task in local_data.TASKS.items():
        if name not in ("anli_r1", "piqa"):
            for file in task.files:
                (tmp_path / file).write_text("{" if name == "copa" else EXAMPLE_ROWS.get(name, ""))
    with pytest.raises(UserError, match=message):
        evaluation.evaluate(never, tasks, tmp_path)
