"""All shared fields and their values.

A recipe (`gpt.py`, `pgpt.py`, `lgpt.py`, `cgpt.py`, or your own) takes this config and changes what differs. Sizes, the
argument after the colon in `--config=configs/pgpt.py:quickstart`:

- `paper`: the full recipe of arXiv 2404.14462: 10B tokens of FineWeb-Edu, for GPUs or TPUs.
- `quickstart`: a small version, trained on the source code of Python's standard library: minutes on two CPU cores,
  nothing to download.
- `tiny`: a smaller version, trained in seconds, to test a change or a machine.
"""

from ml_collections import ConfigDict, config_dict

from smallgpt_jax.errors import UserError

SIZES = ("paper", "quickstart", "tiny")


def get_config(size: str) -> ConfigDict:
    config = paper()
    if size == "quickstart":
        quickstart(config)
    elif size == "tiny":
        tiny(config)
    elif size != "paper":
        raise UserError(f"no size {size!r}; choose from {', '.join(SIZES)}")
    config.lock()
    config.model.unlock()  # recipes add their architecture's fields
    return config


def paper() -> ConfigDict:
    config = ConfigDict()

    config.model = model = ConfigDict()
    model.architecture = config_dict.placeholder(str)  # gpt | pgpt | lgpt | cgpt | package.module:Class
    model.vocab_size = 50_304  # rows of the embedding: at least the tokenizer's entries
    model.context_length = 1024  # positions of a sequence
    model.num_layers = 12  # blocks, in all paths and stages together
    model.num_heads = 12  # attention heads per block; divides d_model
    model.d_model = 768  # width of the residual stream (of the first stage: lgpt, cgpt)
    model.num_kv_heads = 0  # key–value heads per block, shared by groups of heads; 0: num_heads
    model.qk_norm = False  # RMSNorm over each head's queries and keys
    model.attention_windows = ()  # attention span of each block in positions, tiled over the depth: (256, 0)
    # alternates 256 and all; 0: all
    model.norm = "layer"  # norm of blocks and before the head: "layer" | "rms"
    model.norm_epsilon = 1e-5  # added to the variance
    model.mlp = "dense"  # MLP of blocks: "dense", two layers | "gated", act(x·W_gate) ⊙ x·W_up, then W_down
    model.mlp_ratio = 4.0  # width of the MLP's inner layer / d_model
    model.dropout = 0.0  # rate, on the embeddings and on the output of each block part
    model.activation = "gelu"  # of the MLPs: "gelu", exact | "gelu_tanh", GPT-2's approximation | "silu"
    model.position = "learned"  # positions: "learned" embedding | "rope" | "alibi" (XLA's attention only) |
    # "none", the causal mask alone. All but "learned" work beyond context_length and can be trained further with
    # another one (docs/conversion.md)
    model.rope_base = 10_000.0  # rope: wavelength of the slowest pair / 2π, about
    model.use_bias = False  # biases in blocks, LayerNorms included
    model.tie_embeddings = False  # share one matrix between token embedding and head
    model.dtype = "bfloat16"  # of products and activations: float32 | bfloat16; weights are float32
    model.attention = "auto"  # auto | splash (TPU) | cudnn (NVIDIA) | xla (anywhere)
    model.scan_layers = False  # loop over blocks: faster compilation, slower steps, more memory
    model.remat = "none"  # rematerialization: "none" | "dots", saves only products | "full", saves nothing

    config.data = data = ConfigDict()
    data.source = "hf:HuggingFaceFW/fineweb-edu:sample-10BT"  # python_stdlib | files: a path or glob of
    # .txt, .jsonl, .parquet, also .gz, .bz2, .zst | hf:NAME[:CONFIG] | tfds:NAME; or several, comma-separated
    data.text_field = "text"  # JSON field or column of the document
    data.invalid_utf8 = "refuse"  # in files: "refuse" | "replace" the invalid bytes
    data.invalid_items = "refuse"  # broken lines, and lines without the text field: "refuse" | "skip"
    data.tokenizer = "gpt2"  # sentencepiece:SIZE | gpt2 | bytes | a path
    data.validation_fraction = 0.01  # of documents, selected by a hash of their text
    data.store = "data/fineweb-edu"  # folder of the token store, used unchanged once it exists;
    # "": in the cache folder, rebuilt when the source changes
    data.mixture = ""  # several stores by weight instead of one: "FOLDER=WEIGHT,FOLDER=WEIGHT,…"; source, tokenizer
    # and store are then ignored
    data.packing = "concat"  # documents to rows: "concat", concatenated and cut | "best_fit", fewest cuts, some padding
    data.separate_documents = False  # mask attention between documents in a row
    data.workers = 2  # threads that prefetch batches; 0: none

    config.mesh = mesh = ConfigDict()
    mesh.data = -1  # data parallelism: replicas of the model; -1: all remaining devices
    mesh.fsdp = 1  # shards of weights and optimizer state; splits the batch too. With model.remat "dots" or "full"
    # no device holds the weights of all blocks at a time
    mesh.tensor = 1  # tensor parallelism: shards of heads, MLP width and vocabulary
    mesh.path = 1  # shards of pgpt's paths

    config.optimizer = optimizer = ConfigDict()
    optimizer.name = "adamw"  # adamw | lion
    optimizer.learning_rate = 6e-4  # peak, at the end of the warm-up
    optimizer.warmup_steps = 715  # linear, from 0
    optimizer.decay_steps = 19_073  # step at which the cosine ends; constant afterwards
    optimizer.final_learning_rate = 6e-5
    optimizer.weight_decay = 0.1  # of matrices only: not of biases, norms, path weights
    optimizer.beta1 = 0.9
    optimizer.beta2 = 0.95
    optimizer.clip_norm = 1.0  # maximum norm of the gradient; 0: no clipping

    config.train = train = ConfigDict()
    train.steps = 19_073  # training steps
    train.batch_size = 512  # sequences per step, over all devices
    train.microbatches = 8  # sequential parts of a batch, in evaluation too; saves memory
    train.loss_chunks = 8  # parts of a sequence whose logits are computed at a time; divides context_length
    train.seed = 1337  # of weights, data order and dropout; 0 to 2^32 - 1
    train.log_every = 10  # steps between log lines
    train.eval_every = 250  # steps between evaluations
    train.eval_steps = 20  # batches per evaluation; 0: the whole validation split
    train.checkpoint_every = 1000  # steps between checkpoints; the last step is always saved
    train.keep_checkpoints = 3  # newest checkpoints to keep
    train.on_nonfinite = "stop"  # if loss or gradient is not finite: "stop" the run | "skip" the update.
    # A run whose weights are not finite always stops
    train.max_nonfinite = 10  # consecutive skipped updates after which a run stops
    return config


def quickstart(config: ConfigDict) -> None:
    config.model.vocab_size = 1024
    config.model.context_length = 128
    config.model.num_layers = 4
    config.model.num_heads = 4
    config.model.d_model = 128
    config.model.dtype = "float32"
    config.data.source = "python_stdlib"
    config.data.tokenizer = "sentencepiece:1024"
    config.data.validation_fraction = 0.1
    config.data.store = ""
    config.optimizer.learning_rate = 3e-3
    config.optimizer.final_learning_rate = 3e-4
    config.optimizer.warmup_steps = 50
    config.optimizer.decay_steps = 2000
    config.train.steps = 2000
    config.train.batch_size = 8
    config.train.microbatches = 1
    config.train.loss_chunks = 4
    config.train.log_every = 25
    config.train.eval_every = 500
    config.train.eval_steps = 64
    config.train.checkpoint_every = 500


def tiny(config: ConfigDict) -> None:
    quickstart(config)
    config.model.vocab_size = 512
    config.model.context_length = 64
    config.model.d_model = 64
    config.model.scan_layers = True
    config.data.tokenizer = "bytes"
    config.optimizer.warmup_steps = 5
    config.optimizer.decay_steps = 40
    config.train.steps = 40
    config.train.log_every = 10
    config.train.eval_every = 20
    config.train.eval_steps = 4
    config.train.checkpoint_every = 20
