"""Tests of the training and evaluation steps, mostly on meshes of eight devices.

The tests compare losses on several devices with losses on one device. They also cover collectives,
bfloat16, evaluation and dropout masks.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import ARCHITECTURES, build, forward, init, load_config
from flax import linen as nn
from jax.sharding import PartitionSpec as P
from run_helpers import program_of, start_from

from smallgpt_jax import models
from smallgpt_jax.data.packing import Batch
from smallgpt_jax.devices import sharding
from smallgpt_jax.models import parameters
from smallgpt_jax.objectives.objective import Objective
from smallgpt_jax.planning import hlo
from smallgpt_jax.run.checkpoint import Checkpoints
from smallgpt_jax.training.build import build_program
from smallgpt_jax.training.step import Hyperparameters, train_step
from smallgpt_jax.training.validation import eval_step

pytestmark = pytest.mark.slow
SMALL = dict(
    model__num_layers=2,
    model__d_model=16,
    model__num_heads=2,
    model__vocab_size=64,
    model__context_length=32,
    train__batch_size=16,
    optimizer__warmup_steps=0,
)
# More config fields for each architecture. Together they cover learned positions, RoPE and ALiBi on
# a mesh.
EXTRA_FIELDS = {
    "gpt": {},
    "pgpt": {"model__position": "rope"},
    "cgpt": {"model__position": "alibi", "model__blocks_per_stage": 1},
}


@functools.cache
def compiled_program(architecture, devices, **fields):
    """Returns a program with the config fields SMALL, and its training step."""
    config = load_config(architecture, **{**SMALL, **EXTRA_FIELDS.get(architecture, {}), **fields})
    program = build_program(config, jax.devices()[:devices])
    return program, program.bind(config)


def draw_batch(program, seed: int) -> Batch:
    """Returns random tokens. If rows are packed, each has up to three documents, and the
    microbatches have different numbers of targets.
    """
    rng, shapes = np.random.default_rng(seed), program.abstract_batch()
    tokens = rng.integers(0, 64, shapes.tokens_BxT1.shape, np.int32)
    if shapes.targets_BxT is None:
        return Batch(tokens)
    shape = shapes.targets_BxT.shape
    return Batch(
        tokens,
        np.sort(rng.integers(1, 4, shape), axis=1).astype(np.int32),
        rng.random(shape) < [[0.9], [0.1], [0.5], [0.3]],
        rng.integers(0, 64, shape, np.int32),
    )


def first_metrics(architecture, devices=1, steps=3, **fields):
    """Returns the loss and gradient norm of the first training steps, (steps, 2)."""
    program, step = compiled_program(architecture, devices, **fields)
    state = start_from(program, init(program.model))
    found = []
    for seed in range(steps):
        batch = jax.device_put(draw_batch(program, seed), sharding.batch_sharding(program.mesh))
        state, metrics = step(state, batch)
        found.append([float(metrics["loss"]), float(metrics["grad_norm"])])
    return np.array(found)


def mesh(**axes):
    return {f"mesh__{axis}": length for axis, length in {"data": 1, **axes}.items()}


Z_LOSS = {"train__z_loss": 0.5}
# Muon with multipliers by width and depth, on packed rows. With 4 heads and 2 key–value heads,
# queries and keys differ in shape.
PATHS = {
    "data__packing": "best_fit",
    "data__separate_documents": True,
    "train__batch_size": 4,
    "model__context_length": 128,  # the kernel splash has blocks of 128 tokens
    "optimizer__name": "muon",
    "optimizer__base_width": 8,
    "optimizer__base_depth": 2,
    "model__num_heads": 4,
    "model__num_kv_heads": 2,
    "model__qk_norm": True,
    "model__tie_embeddings": True,
}
# Each device has parts of the matrices of one path.
ON_PATHS = mesh(data=2, tensor=2, path=2)
# architecture, fields of both programs, fields of the program on eight devices
ON_EIGHT_DEVICES = [
    (
        "gpt",
        Z_LOSS,
        {
            **mesh(data=2, fsdp=2, tensor=2),
            "train__microbatches": 2,
            "model__scan_layers": False,
        },
    ),
    ("gpt", Z_LOSS, mesh(fsdp=8)),
    ("pgpt", PATHS, {**ON_PATHS, "train__microbatches": 2, "model__attention": "splash"}),
    (
        "cgpt",
        {"model__rank_ratio": 0.5},
        {
            **mesh(data=2, fsdp=2, tensor=2),
            "model__remat": "full",
            "train__loss_chunks": 8,
        },
    ),
]
ON_EIGHT_DEVICES += [
    (name, {}, mesh(data=2, fsdp=2, tensor=2))
    for name in ARCHITECTURES
    if name not in ["lgpt", *(case[0] for case in ON_EIGHT_DEVICES)]  # cgpt has lgpt's stages
]


@pytest.mark.parametrize("architecture, same, fields", ON_EIGHT_DEVICES)
def test_eight_devices_match_one_device(architecture, same, fields):
    """Losses and gradient norms match, at the first step and after two updates. The cases include
    microbatches, loss chunks, unrolled layers, remat, packed rows, Muon and factored matrices.
    """
    np.testing.assert_allclose(
        first_metrics(architecture, devices=8, **same, **fields),
        first_metrics(architecture, **same),
        rtol=1e-5,
    )


def test_bfloat16_on_four_devices():
    """Within 2% of float32 on one device. Devices cast the weights before they gather them."""
    fields = {**mesh(data=2, tensor=2), "train__microbatches": 2, "model__dtype": "bfloat16"}
    found = first_metrics("gpt", devices=4, **Z_LOSS, **fields)
    np.testing.assert_allclose(found, first_metrics("gpt", **Z_LOSS), rtol=0.02)


def test_factors_are_sharded_like_their_matrices():
    """The axis of the rank is replicated."""
    axes = mesh(fsdp=2, tensor=2, path=2)
    program = build_program(load_config("pgpt", **SMALL, **axes, model__rank_ratio=0.5))
    block = program.shardings.params["trunk"]["paths"]["blocks"]
    assert block["attention"]["qkv"]["kernel_in"].spec == P("path", None, "fsdp", None)
    assert block["attention"]["qkv"]["kernel_out"].spec == P(
        "path", None, None, "tensor", None, None
    )
    assert block["mlp"]["down"]["kernel_in"].spec == P("path", None, "tensor", None)
    assert block["mlp"]["down"]["kernel_out"].spec == P("path", None, None, "fsdp")


def test_z_loss_is_added_to_the_training_loss():
    """The added term is train.z_loss times the mean of log(Σ exp(logits))². Eight devices with
    microbatches have the same loss (above).
    """
    program, _ = compiled_program("gpt", 1, **Z_LOSS)
    tokens = draw_batch(program, 0).tokens_BxT1
    logits = np.asarray(forward(program.model, init(program.model), tokens[:, :-1]), np.float64)
    log_z = np.log(np.exp(logits).sum(axis=-1))
    nats = log_z - np.take_along_axis(logits, tokens[:, 1:, None], axis=2)[..., 0]
    expected = np.mean(nats) + 0.5 * np.mean(log_z**2)
    assert first_metrics("gpt", steps=1, **Z_LOSS)[0, 0] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("microbatches", [1, 2])
def test_data_parallel_traffic_is_weights_and_gradients(microbatches):
    """Devices gather the weights that they store, and sum the gradients, once per step. Only scales
    are replicated.

    With several microbatches, sums are scattered: a device receives an eighth. Otherwise, the CPU
    compiler has no reduce-scatters.
    """
    program, _ = compiled_program("gpt", 8, **mesh(data=8), train__microbatches=microbatches)
    traffic = hlo.HloModule(program.compiled_train_step.as_text()).collectives()
    params = jax.tree.leaves(models.abstract_params(program.model))
    scales = 4 * sum(p.size for p in params if p.name == "scale")
    matrices = 4 * sum(p.size for p in params) - scales
    found = [
        traffic.get(kind, {"bytes": 0})["bytes"]
        for kind in ("all-gather", "reduce-scatter", "all-reduce")
    ]
    expected = (
        [matrices, 0, scales + matrices] if microbatches == 1 else [matrices, matrices / 8, scales]
    )
    few = [0, 0, 128]  # scalars, such as the loss and the norm of each gradient
    assert all(0 <= a - b <= more for a, b, more in zip(found, expected, few)), (found, expected)
    # Modules gather what they use; with several microbatches, all weights are gathered before.
    uses = 4 * 2 + 3  # matrices of both blocks, tables of tokens and positions, head
    assert traffic["all-gather"]["count"] == (uses if microbatches == 1 else 4 + 3)


def test_gradients_are_divided_like_the_stored_weights():
    """Before the optimizer, so that a device updates only what it stores. CPUs have no other
    traffic with them, so the traced step is read.
    """
    program = build_program(load_config("gpt", **SMALL, **mesh(data=8)))
    number = jax.ShapeDtypeStruct((), "float32")
    inputs = (
        program.abstract_state,
        program.abstract_batch(),
        Hyperparameters(jax.ShapeDtypeStruct((), "uint32"), number, number),
    )
    with sharding.use_mesh(program.mesh):
        equations = jax.make_jaxpr(functools.partial(train_step, program))(*inputs).jaxpr.eqns
    constraints = [x for x in equations if x.primitive.name == "sharding_constraint"]
    specs = [tuple(x.params["sharding"].spec) for x in constraints]
    assert specs == [tuple(x.spec) for x in jax.tree.leaves(program.shardings.params)]
    assert sum("data" in spec for spec in specs) == 7  # all matrices and tables


@pytest.mark.parametrize("fields", [{"lora_rank": 2}, {"train_only": "mlp/up"}])
def test_frozen_weights_are_whole_on_each_device(fields):
    """They have no optimizer state to divide, so nothing of them is exchanged."""
    program, _ = compiled_program(
        "gpt",
        8,
        **mesh(data=8),
        train__microbatches=2,
        **{f"optimizer__{name}": value for name, value in fields.items()},
    )
    traffic = hlo.HloModule(program.compiled_train_step.as_text()).collectives()
    trained = program.shardings.trained
    divided = jax.tree.map(lambda s: "data" in s.spec, trained)
    sizes = jax.tree.map(lambda x: 4 * x.size, program.abstract_state.trained)
    gathered = jax.tree.map(lambda size, is_divided: size * is_divided, sizes, divided)
    assert traffic["all-gather"]["bytes"] == sum(jax.tree.leaves(gathered))
    names = {path[0].key for path, x in jax.tree.leaves_with_path(divided) if x}
    assert names == ({"lora"} if "lora_rank" in fields else {"trunk"})


def test_fsdp_gathers_weights_but_not_the_embedding():
    """Devices exchange tokens and rows of the embedding, forward and backward. All weights but
    scales are sharded.
    """
    program, _ = compiled_program("gpt", 8, **Z_LOSS, **mesh(fsdp=8))
    traffic, params = (
        hlo.HloModule(program.compiled_train_step.as_text()).collectives(),
        models.abstract_params(program.model),
    )
    matrices = sum(p.size for p in jax.tree.leaves(params) if p.name != "scale")
    assert traffic["all-gather"]["bytes"] == 4 * (matrices - 64 * 16 + 16 * 32)
    assert traffic["all-to-all"] == {"count": 2, "bytes": 2 * 4 * 2 * 32 * 16}


def test_paths_are_joined_by_one_all_reduce():
    """pgpt's forward pass with one path per device has a single collective, which sums the paths'
    outputs.
    """
    config = load_config("pgpt", **SMALL, mesh__data=1, mesh__path=2)
    program = build_program(config, jax.devices()[:2])
    params = program.abstract_state.params
    tokens = jax.ShapeDtypeStruct((8, 32), "int32", sharding=sharding.batch_sharding(program.mesh))
    with sharding.use_mesh(program.mesh):
        forward = (
            jax.jit(
                lambda params, tokens: program.model.apply(
                    {"params": params}, tokens, method="hidden"
                )
            )
            .lower(params, tokens)
            .compile()
        )
    assert hlo.HloModule(forward.as_text()).collectives() == {
        "all-reduce": {"count": 1, "bytes": 4 * 8 * 32 * config.model.d_model}
    }


def test_bfloat16_gradients_match_float32():
    """Gradients match although one token occurs over a thousand times.

    The gradient of this token's embedding has too many terms for a sum in bfloat16.
    """
    tokens = np.random.default_rng(0).integers(0, 257, (64, 65))
    tokens[np.random.default_rng(1).random(tokens.shape) < 0.3] = 7
    gradients = {}
    for dtype in ("float32", "bfloat16"):
        model = build("gpt", dtype=dtype, num_layers=1, d_model=16, num_heads=2)
        params = init(model)
        total = functools.partial(eval_step, program_of(model))
        gradient = jax.jit(jax.grad(lambda *arguments, f=total: f(*arguments).loss))
        gradients[dtype] = jax.device_get(gradient(params, {}, Batch(tokens)))
    for (path, expected), found in zip(
        jax.tree_util.tree_leaves_with_path(gradients["float32"]),
        jax.tree.leaves(gradients["bfloat16"]),
    ):
        error = np.linalg.norm(found - expected) / np.linalg.norm(expected)
        assert error < 0.03, (path, error)


def test_evaluation_excludes_masked_targets():
    model = build("gpt", num_layers=1)
    params = init(model)
    tokens = np.random.default_rng(0).integers(0, 257, (4, 65))

    def evaluate(batch, loss_chunks, microbatches):
        program = program_of(model, Objective(loss_chunks), microbatches=microbatches)
        return jax.jit(functools.partial(eval_step, program))(params, {}, batch)

    all_targets = np.ones((1, 64), bool)
    rows = [
        evaluate(Batch(tokens[i : i + 1], None, all_targets), loss_chunks=1, microbatches=1)
        for i in (0, 2)
    ]
    loss_mask = np.tile([[True], [False], [True], [False]], (1, 64))
    sums = evaluate(Batch(tokens, None, loss_mask), loss_chunks=4, microbatches=2)
    assert sums.counted == sums.targets == 2 * 64
    assert float(sums.loss) == pytest.approx(sum(float(row.loss) for row in rows), rel=1e-5)


def test_microbatches_save_memory_in_evaluation():
    def temporaries(microbatches):
        config = load_config(
            "gpt", **{**SMALL, "train__batch_size": 64}, train__microbatches=microbatches
        )
        program = build_program(config, jax.devices()[:1])
        return program.compiled_eval_step.memory_analysis().temp_size_in_bytes

    assert temporaries(8) < temporaries(1) / 4


# ---------------------------------------------------------------------- dropout


class DropoutMasks:
    """Runs two training steps of a pgpt and records the dropout masks.

    The pgpt has two paths of three blocks, and each step has two microbatches. Every block must
    have its own mask, so three masks are recorded per path. If the blocks shared a mask, two would
    be recorded, because flax computes shared values twice. With two blocks per path, the number of
    masks would be the same in both cases.
    """

    def __init__(self, devices: int = 1, **fields):
        self.found = []
        config = load_config(
            "pgpt",
            **{**SMALL, "model__num_layers": 6, **fields},
            model__dropout=0.5,
            train__microbatches=2,
        )
        self.program = build_program(config, jax.devices()[:devices])
        with nn.intercept_methods(self.record):
            self.step = self.program.bind(config)

    def record(self, next_function, args, kwargs, context):
        if not isinstance(context.module, nn.Dropout):
            return next_function(*args, **kwargs)
        scale = next_function(jnp.ones_like(args[0]), *args[1:], **kwargs)
        name = "/".join(context.module.path)
        jax.debug.callback(lambda mask: self.found[-1].append((name, mask.tobytes())), scale != 0)
        return args[0] * scale

    def run(self, restart=lambda state: state) -> list[list[tuple[str, bytes]]]:
        """Returns the sorted pairs (module name, mask of kept entries) of each of the two steps.

        After each step, `restart(state)` replaces the state.
        """
        self.found = []
        tokens = np.arange(16 * 33, dtype=np.int32).reshape(16, 33) % 64
        batch = Batch(jax.device_put(tokens, sharding.batch_sharding(self.program.mesh)))
        state = start_from(self.program, init(self.program.model))
        for _ in range(2):
            self.found.append([])
            state, _ = self.step(state, batch)
            jax.effects_barrier()
            state = restart(state)
        return [sorted(masks) for masks in self.found]


def test_dropout_masks_differ_and_do_not_depend_on_mesh_or_resumption(tmp_path):
    """Every step and microbatch has its own mask for the embedding, and for attention and MLP of
    each block.
    """
    one = DropoutMasks()
    expected = one.run()
    masks = [mask for step in expected for _, mask in step]
    assert len(set(masks)) == len(masks) == 2 * 2 * (1 + 2 * 6)

    def resume(state):
        checkpoints = Checkpoints(tmp_path, keep=1, log=print)
        checkpoints.save(int(state.step), state)
        checkpoints.wait_until_finished()
        return checkpoints.restore_latest(one.program.abstract_state)

    assert one.run(resume) == expected
    assert DropoutMasks(devices=4, **mesh(data=2, path=2)).run() == expected


def test_the_initial_state_takes_two_traces():
    """The model is traced once for shapes and axis names, and once for the state, which a resumed
    run does not initialize. Tracing slows the start of a run.
    """
    calls = []

    def count(call, arguments, keywords, context):
        if isinstance(context.module, models.LanguageModel) and context.method_name == "__call__":
            calls.append(arguments)
        return call(*arguments, **keywords)

    parameters.trace_variables.cache_clear()  # other tests have traced the same model
    with nn.intercept_methods(count):
        program = build_program(load_config("gpt", **SMALL), jax.devices()[:1])
        shapes = program.abstract_state
        assert len(calls) == 1
        state = program.initial_state(0)
    assert len(calls) == 2
    assert jax.tree.map(lambda x: (x.shape, x.dtype), state) == jax.tree.map(
        lambda x: (x.shape, x.dtype), shapes
    )
