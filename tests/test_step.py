"""Loss, gradients, optimiser and mesh: one step against plain formulas, and the same on any mesh."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import ARCHITECTURES, build, init, load_config
from flax import linen as nn

from smallgpt_jax import models, sharding
from smallgpt_jax.analysis import hlo
from smallgpt_jax.analysis.flops import matmul_flops, train_flops_per_token
from smallgpt_jax.checkpoint import Checkpoints
from smallgpt_jax.data.packing import Rows
from smallgpt_jax.errors import UserError
from smallgpt_jax.optimizer import learning_rate_schedule, make_optimizer
from smallgpt_jax.program import build_program
from smallgpt_jax.step import cross_entropy, eval_step, weighted_loss


@pytest.mark.parametrize("chunks", [1, 4, 16])
def test_cross_entropy_and_its_gradients(chunks):
    keys = jax.random.split(jax.random.key(0), 4)
    x, head = jax.random.normal(keys[0], (3, 16, 8)), jax.random.normal(keys[1], (50, 8))
    targets = jax.random.randint(keys[2], (3, 16), 0, 50)
    weights = jax.random.uniform(keys[3], (3, 16))

    logits = np.asarray(x, np.float64) @ np.asarray(head, np.float64).T
    probabilities = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
    one_hot = np.eye(50)[targets]
    expected = -np.sum(np.asarray(weights) * np.log((probabilities * one_hot).sum(axis=-1)))
    d_logits = np.asarray(weights)[..., None] * (probabilities - one_hot)

    def loss(x, head):
        return 3 * cross_entropy(x, head, targets, weights, chunks)

    value, (d_x, d_head) = jax.value_and_grad(loss, (0, 1))(x, head)
    assert float(value) == pytest.approx(3 * expected, rel=1e-5)
    assert float(loss(x, head)) == pytest.approx(3 * expected, rel=1e-5)
    np.testing.assert_allclose(d_x, 3 * d_logits @ np.asarray(head), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(
        d_head, 3 * np.einsum("btw,btv->vw", x, d_logits), rtol=1e-4, atol=1e-4)


def test_improbable_tokens():
    """Evaluation knows no bound; in training a loss of more than 70 nats is understated, never infinite."""
    x, head = jnp.ones((1, 1, 1)), jnp.array([[0.0], [200.0], [190.0]])
    arguments = head, jnp.array([[0]]), jnp.ones((1, 1)), 1
    assert float(cross_entropy(x, *arguments)) == pytest.approx(200, rel=1e-6)
    value, gradient = jax.value_and_grad(cross_entropy)(x, *arguments)
    assert 70 <= float(value) < 72 and float(gradient.squeeze()) > 100


def test_gradients_in_bfloat16_are_those_of_float32():
    """Also of a token that is met thousands of times: bfloat16 cannot add up that many terms."""
    tokens = np.random.default_rng(0).integers(0, 257, (64, 65))
    tokens[np.random.default_rng(1).random(tokens.shape) < 0.3] = 7
    gradients = {}
    for dtype in ("float32", "bfloat16"):
        model = build("gpt", dtype=dtype)
        params = init(build("gpt"))
        gradients[dtype], _ = jax.jit(jax.grad(weighted_loss, has_aux=True), static_argnums=(2, 5))(
            params, {}, model, Rows(tokens), jnp.full((64, 64), 1 / 64**2), 1)
    for (path, wanted), found in zip(jax.tree_util.tree_leaves_with_path(gradients["float32"]),
                                     jax.tree.leaves(gradients["bfloat16"])):
        error = jnp.linalg.norm(found - wanted) / jnp.linalg.norm(wanted)
        assert error < 0.03, (path, error)


def test_logits_never_exist_whole():
    """No array of the compiled gradient holds more than a chunk of the logits."""
    x, head = jax.ShapeDtypeStruct((4, 64, 8), "float32"), jax.ShapeDtypeStruct((999, 8), "float32")
    targets, weights = (jax.ShapeDtypeStruct((4, 64), dtype) for dtype in ("int32", "float32"))
    text = jax.jit(jax.grad(cross_entropy), static_argnums=4).lower(
        x, head, targets, weights, 8).as_text()
    assert "32x999x" in text and "256x999x" not in text and "4x64x999x" not in text


def test_learning_rate():
    rate = learning_rate_schedule(
        learning_rate=6e-4, warmup_steps=715, decay_steps=19_073, final_learning_rate=6e-5)
    for step, expected in ((0, 0.0), (143, 6e-4 / 5), (715, 6e-4), (19_073, 6e-5), (30_000, 6e-5)):
        assert float(rate(step)) == pytest.approx(expected, rel=1e-4)
    middle = 6e-5 + (6e-4 - 6e-5) * (1 + math.cos(math.pi * 0.25)) / 2
    assert float(rate(715 + (19_073 - 715) // 4)) == pytest.approx(middle, rel=1e-3)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_update_is_adamw_with_clipping(architecture):
    """One step against Loshchilov & Hutter (arXiv 1711.05101, algorithm 2), decay on matrices only."""
    model = build(architecture, use_bias=True)
    params = init(model)
    boxed = models.abstract_params(model)
    optimizer = make_optimizer(
        boxed, name="adamw", learning_rate=0.01, warmup_steps=0, decay_steps=10,
        final_learning_rate=0.01, weight_decay=0.1, beta1=0.9, beta2=0.95, clip_norm=1.0)
    gradients = jax.tree.map(lambda x: 3 * jnp.sin(100 * x), params)
    norm = math.sqrt(sum(float(jnp.sum(g**2)) for g in jax.tree.leaves(gradients)))
    updates, _ = jax.jit(optimizer.update)(gradients, jax.jit(optimizer.init)(params), params)
    decayed = 0
    for (path, update), g, p in zip(jax.tree_util.tree_leaves_with_path(updates),
                                    jax.tree.leaves(gradients), jax.tree.leaves(params)):
        name = path[-1].key
        is_matrix = name not in ("bias", "scale", "path_logits")
        decayed += is_matrix
        g = np.asarray(g, np.float64) / norm  # the norm is far above 1; bias correction cancels
        expected = -0.01 * (g / (np.abs(g) + 1e-8) + 0.1 * is_matrix * np.asarray(p))
        np.testing.assert_allclose(update, expected, rtol=1e-3, atol=1e-6)
    assert decayed >= 7


@pytest.mark.parametrize("change, words", [
    ({"name": "adamv"}, ["'adamv'", "did you mean 'adamw'"]),
    ({"beta2": 1.0}, ["beta2=1.0"]),
    ({"weight_decay": -1.0}, ["weight_decay=-1.0"]),
    ({"learning_rate": -1.0}, ["learning_rate=-1.0"]),
    *(({field: value}, [f"config.optimizer.{field}={value}", "must be"]) for value in (math.nan, math.inf)
      for field in ("learning_rate", "final_learning_rate", "weight_decay", "clip_norm", "beta1", "beta2")),
    ({"decay_steps": 5}, ["decay_steps=5", "warmup_steps=5"]),
])
def test_impossible_optimizers_are_refused(change, words):
    settings = {**load_config("gpt").optimizer, **change}
    with pytest.raises(UserError) as error:
        make_optimizer(models.abstract_params(build("gpt")), **settings)
    assert all(word in str(error.value) for word in words), str(error.value)


# ---------------------------------------------------------------------- meshes

def losses(architecture, devices=1, steps=20, **fields):
    """The losses of the first training steps."""
    config = load_config(architecture, **fields)
    program = build_program(config, jax.devices()[:devices])
    state = program.initial_state()
    step = program.runnable(program.compile_train_step())
    tokens = np.random.default_rng(0).integers(
        0, config.model.vocab_size, (steps, config.train.batch_size, 65)).astype(np.int32)
    found = []
    for batch in tokens:
        state, metrics = step(state, Rows(jax.device_put(batch, sharding.batch_sharding(program.mesh))))
        found.append(float(metrics["loss"]))
    return np.array(found)


@functools.cache
def losses_on_one_device(architecture):
    return losses(architecture)


@pytest.mark.parametrize("architecture, fields", [
    *((name, {"mesh__data": 2, "mesh__fsdp": 2, "mesh__tensor": 2}) for name in ARCHITECTURES),
    ("gpt", {"mesh__data": 8}),
    ("gpt", {"mesh__data": 1, "mesh__fsdp": 8}),
    ("gpt", {"mesh__data": 2, "mesh__fsdp": 4, "train__microbatches": 1, "model__remat": "dots"}),
    ("pgpt", {"mesh__data": 4, "mesh__path": 2}),
    ("pgpt", {"mesh__data": 2, "mesh__tensor": 2, "mesh__path": 2}),
    ("pgpt", {"mesh__data": 2, "mesh__fsdp": 2, "mesh__path": 2, "model__scan_layers": False}),
    ("lgpt", {"mesh__data": 4, "mesh__tensor": 2}),
    ("cgpt", {"mesh__data": 4, "mesh__tensor": 2}),
])
def test_eight_devices_compute_what_one_does(architecture, fields):
    np.testing.assert_allclose(
        losses(architecture, devices=8, **fields), losses_on_one_device(architecture), rtol=1e-5)


@pytest.mark.parametrize("architecture, position, mesh", [
    ("pgpt", "rope", {"mesh__data": 2, "mesh__tensor": 2, "mesh__path": 2}),
    ("lgpt", "alibi", {"mesh__data": 2, "mesh__fsdp": 2, "mesh__tensor": 2})])
def test_positions_on_a_mesh(architecture, position, mesh):
    """Each device has the slopes of its own heads."""
    one, eight = (losses(architecture, devices, steps=5, model__position=position, **fields)
                  for devices, fields in ((1, {}), (8, mesh)))
    np.testing.assert_allclose(eight, one, rtol=1e-5)


@pytest.mark.parametrize("fields", [
    {"train__microbatches": 2}, {"train__microbatches": 4}, {"train__loss_chunks": 8},
    {"model__scan_layers": False}, {"model__remat": "full"}, {"model__remat": "dots"},
    {"model__remat": "full", "model__scan_layers": False}])
def test_how_a_step_is_computed_does_not_matter(fields):
    np.testing.assert_allclose(
        losses("lgpt", **fields), losses_on_one_device("lgpt"), rtol=1e-5)


@pytest.mark.parametrize("microbatches", [2, 4])
def test_microbatches_on_a_mesh(microbatches):
    found = losses("gpt", devices=2, train__microbatches=microbatches)
    np.testing.assert_allclose(found, losses_on_one_device("gpt"), rtol=1e-5)


def test_lion_trains():
    found = losses("gpt", steps=1, optimizer__name="lion")
    assert np.isfinite(found).all()


def test_weights_lie_where_the_rules_say():
    mesh = sharding.make_mesh(data=1, fsdp=2, tensor=2, path=2)
    params = nn.unbox(sharding.param_shardings(mesh, models.abstract_params(build("pgpt"))))
    P = jax.sharding.PartitionSpec
    blocks = params["trunk"]["paths"]["blocks"]
    assert blocks["mlp"]["up"]["kernel"].spec == P("path", None, "fsdp", "tensor")
    assert blocks["attention"]["out"]["kernel"].spec == P("path", None, "tensor", None, "fsdp")
    assert params["token_embedding"].spec == P("tensor", "fsdp")
    # What an axis does not divide is replicated: 3 heads over 2 devices.
    odd = sharding.param_shardings(mesh, models.abstract_params(build("gpt", d_model=96, num_heads=3)))
    assert odd["trunk"]["blocks"]["attention"]["qkv"]["kernel"].spec == P(
        None, "fsdp", None, None, None)


def test_what_the_mesh_does_not_divide_is_said_once():
    mesh = sharding.make_mesh(data=2, fsdp=1, tensor=4, path=1)
    lines = sharding.undivided(mesh, models.abstract_params(build("gpt", d_model=96, num_heads=3)))
    assert lines == ["heads = 3 is whole on each device: config.mesh.tensor=4 does not divide it"]


# ---------------------------------------------------------------------- traffic

def compiled(architecture, **fields):
    config = load_config(architecture, **fields)
    return hlo.Program(build_program(config, jax.devices()[:8]).compile_train_step().as_text())


def test_copies_of_the_model_send_each_other_gradients_and_nothing_else():
    model = build("gpt")
    traffic = compiled("gpt", mesh__data=8).collectives()
    assert set(traffic) == {"all-reduce"}
    of_gradients = 4 * models.num_parameters(model)
    assert 0 < traffic["all-reduce"]["bytes"] - of_gradients <= 16  # the loss, and an empty sum


def test_paths_meet_once():
    """pgpt's forward pass with each path on a device of its own: one all-reduce of what they found."""
    config = load_config("pgpt", mesh__data=1, mesh__path=2)
    program = build_program(config, jax.devices()[:2])
    params = program.abstract_state().params
    tokens = jax.ShapeDtypeStruct((8, 64), "int32", sharding=sharding.batch_sharding(program.mesh))
    with sharding.context(program.mesh):
        forward = jax.jit(lambda params, tokens: program.model.apply(
            {"params": params}, tokens, method="hidden")).lower(params, tokens).compile()
    assert hlo.Program(forward.as_text()).collectives() == {
        "all-reduce": {"count": 1, "bytes": 4 * 8 * 64 * config.model.d_model}}


@pytest.mark.parametrize("lengths, words", [
    ({"data": 3}, ["data=3", "which is 8"]),
    ({"data": -1, "fsdp": -1}, ["one of them may be -1"]),
    ({"data": 0}, ["data=0", "at least 1"]),
    ({"data": -1, "tensor": 3}, ["tensor=3", "which is 8"]),
])
def test_impossible_meshes_are_refused(lengths, words):
    with pytest.raises(UserError) as error:
        sharding.make_mesh(**{"data": 1, "fsdp": 1, "tensor": 1, "path": 1, **lengths})
    assert all(word in str(error.value) for word in words), str(error.value)


# ---------------------------------------------------------------------- counting

def test_flops_of_a_matrix_product():
    a, b = jax.ShapeDtypeStruct((3, 4), "float32"), jax.ShapeDtypeStruct((4, 5), "float32")
    assert matmul_flops(jnp.dot, a, b) == 2 * 3 * 4 * 5

    def loop(a, b):
        return jax.lax.scan(lambda x, _: (x @ b @ b.T, None), a, length=7)[0]

    assert matmul_flops(jax.jit(loop), a, b) == 7 * 2 * (2 * 3 * 4 * 5)
    with pytest.raises(ValueError, match="unknown length"):
        matmul_flops(lambda a: jax.lax.while_loop(lambda x: x.sum() < 1, lambda x: x @ x.T @ x, a), a)


@pytest.mark.parametrize("scan_layers", [True, False])
def test_flops_of_gpt(scan_layers):
    """6 a weight of a matrix product, and 12·L·D·T for attention (arXiv 2204.02311, appendix B)."""
    config = load_config("gpt", "paper", model__scan_layers=scan_layers).model
    weights = 12 * 12 * 768**2 + 768 * config.vocab_size
    expected = 6 * weights + 12 * 12 * 768 * 1024
    assert train_flops_per_token(models.build(**config)) == expected


@pytest.mark.parametrize("change", [{"attention": "splash"}, {"remat": "full"}])
def test_flops_do_not_depend_on_how_they_are_computed(change):
    config = load_config("gpt", model__context_length=128).model
    plain = train_flops_per_token(models.build(**config))
    assert train_flops_per_token(models.build(**{**config, **change})) == plain


@pytest.mark.parametrize("microbatches", [1, 2])
def test_evaluation_leaves_out_what_does_not_count(microbatches):
    model = build("gpt")
    params = init(model)
    tokens = jax.random.randint(jax.random.key(0), (4, 65), 0, 257)
    every = jnp.ones((1, 64), bool)
    rows = [eval_step(params, {}, Rows(tokens[i:i + 1], None, every), model=model, microbatches=1, loss_chunks=1)
            for i in range(4)]
    counts = jnp.broadcast_to(jnp.array([True, False, True, False])[:, None], (4, 64))
    loss, targets = eval_step(
        params, {}, Rows(tokens, None, counts), model=model, microbatches=microbatches, loss_chunks=4)
    assert int(targets) == 2 * 64
    assert float(loss) == pytest.approx(float(rows[0][0] + rows[2][0]), rel=1e-5)


def test_parts_save_memory_in_evaluation_too():
    def temporaries(**fields):
        config = load_config("gpt", train__batch_size=64, **fields)
        program = build_program(config, jax.devices()[:1])
        return program.compile_eval_step().memory_analysis().temp_size_in_bytes

    assert temporaries(train__microbatches=8) < temporaries() / 4


# ---------------------------------------------------------------------- dropout

def masks_of_two_steps(config, devices: int = 1, restart=lambda state: state) -> list[list[tuple[str, bytes]]]:
    """The dropout masks of the first two training steps, sorted: the name of the module, and which entries it keeps.
    The second step starts from what `restart` makes of the state after the first one."""
    found = []

    def record(next_function, args, kwargs, context):
        if not isinstance(context.module, nn.Dropout):
            return next_function(*args, **kwargs)
        scale = next_function(jnp.ones_like(args[0]), *args[1:], **kwargs)
        name = "/".join(context.module.path)
        jax.debug.callback(lambda mask: found[-1].append((name, mask.tobytes())), scale != 0)
        return args[0] * scale

    program = build_program(config, jax.devices()[:devices])
    with nn.intercept_methods(record):
        step = program.runnable(program.compile_train_step())
    batch = jnp.arange(config.train.batch_size * 65, dtype=jnp.int32).reshape(-1, 65) % config.model.vocab_size
    batch = Rows(jax.device_put(batch, sharding.batch_sharding(program.mesh)))
    state = program.initial_state()
    for _ in range(2):
        found.append([])
        state, _ = step(state, batch)
        jax.effects_barrier()
        state = restart(state)
    return [sorted(masks) for masks in found]


def dropout_config(**fields):
    """Two paths of three blocks, two microbatches. (Masks that were alike in all blocks would be computed twice per
    path, once for flax's check of what the loop over them shares: of two blocks as often as they should.)"""
    return load_config("pgpt", model__dropout=0.5, model__num_layers=6, train__microbatches=2, **fields)


@functools.cache
def masks_on_one_device():
    return masks_of_two_steps(dropout_config())


def test_no_two_dropout_masks_are_alike():
    """Those of the embedding and of each block's two parts, in each path, microbatch and step."""
    masks = [mask for step in masks_on_one_device() for _, mask in step]
    assert len(set(masks)) == len(masks) == 2 * 2 * (1 + 2 * 6)


def test_dropout_masks_are_the_same_on_any_mesh():
    config = dropout_config(mesh__data=2, mesh__tensor=2, mesh__path=2)
    assert masks_of_two_steps(config, devices=8) == masks_on_one_device()


def test_dropout_masks_are_the_same_after_a_resume(tmp_path):
    config = dropout_config()

    def restart(state):
        checkpoints = Checkpoints(tmp_path, keep=1, say=print)
        checkpoints.save(int(state.step), state)
        checkpoints.finish()
        return checkpoints.restore_newest(build_program(config, jax.devices()[:1]).abstract_state())

    assert masks_of_two_steps(config, restart=restart) == masks_on_one_device()
