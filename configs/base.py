"""Every knob there is, with the values that all recipes share.

A recipe (`gpt.py`, `pgpt.py`, `lgpt.py`, `cgpt.py`, or your own) takes this config and states what
differs. Sizes, the argument after the colon in `--config=configs/pgpt.py:quickstart`:

- `paper`: the full recipe of arXiv 2404.14462: 10B tokens of FineWeb-Edu, for GPUs or TPUs.
- `quickstart`: the same model, small, on the Python standard library's own source: minutes on two
  CPU cores, nothing to download.
- `tiny`: the same again in seconds, to see that a change or a machine works at all.
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
        raise UserError(f"no size {size!r}: choose from {', '.join(SIZES)}")
    config.lock()
    config.model.unlock()  # recipes add their architecture's own fields there
    return config


def paper() -> ConfigDict:
    config = ConfigDict()

    config.model = model = ConfigDict()
    model.architecture = config_dict.placeholder(str)  # gpt | pgpt | lgpt | cgpt | package.module:Class
    model.vocab_size = 50_304  # rows of the embedding: at least the tokenizer's entries
    model.context_length = 1024  # positions that the model can see at once
    model.num_layers = 12  # blocks, over all paths and stages
    model.num_heads = 12  # attention heads a block; divides d_model
    model.d_model = 768  # width of the residual stream (of the first stage: lgpt, cgpt)
    model.num_kv_heads = 0  # heads of keys and values per block, shared by groups of heads; 0: num_heads
    model.qk_norm = False  # RMSNorm over each head's queries and keys
    model.attention_windows = ()  # positions that a block's attention spans, tiled over the depth: (256, 0)
    # alternates 256 and all; 0: all
    model.norm = "layer"  # of blocks and before the head: "layer" | "rms"
    model.norm_epsilon = 1e-5  # added to the variance
    model.mlp = "dense"  # of blocks: "dense", two layers | "gated", act(x·W_gate) ⊙ x·W_up, then W_down
    model.mlp_ratio = 4.0  # width of the MLP's inner layer / d_model
    model.dropout = 0.0  # on the embedding sum and on what each block part adds
    model.activation = "gelu"  # of the MLPs: "gelu", exact | "gelu_tanh", the approximation that GPT-2 has | "silu"
    model.position = "learned"  # order of the tokens: "learned" embedding | "rope" | "alibi" (XLA's attention
    # only) | "none", the causal mask alone. All but "learned" can be applied beyond context_length, and trained
    # further at another one (docs/conversion.md)
    model.rope_base = 10_000.0  # rope: the wavelength of the slowest pair is about 2π times this
    model.use_bias = False  # biases in blocks, LayerNorms included
    model.tie_embeddings = False  # the head shares the token embedding's matrix
    model.dtype = "bfloat16"  # of products and activations (float32 | bfloat16); weights: float32
    model.attention = "auto"  # auto | splash (TPU) | cudnn (NVIDIA) | xla (anywhere)
    model.scan_layers = False  # loop over blocks: compiles faster, runs slower, needs more memory
    model.remat = "none"  # less memory, more work: "dots" keeps only the results of products, "full" nothing

    config.data = data = ConfigDict()
    data.source = "hf:HuggingFaceFW/fineweb-edu:sample-10BT"  # python_stdlib | files: a path or glob of
    # .txt, .jsonl, .parquet, also .gz, .bz2, .zst | hf:NAME[:CONFIG] | tfds:NAME; or several, with commas
    data.text_field = "text"  # the field of a JSON line, or column, that holds the document
    data.invalid_utf8 = "refuse"  # "refuse" a file that is not UTF-8, or "replace" what is not
    data.invalid_items = "refuse"  # "refuse" lines without text in the field, broken ones; or "skip" them
    data.tokenizer = "gpt2"  # sentencepiece:SIZE | gpt2 | bytes | a path
    data.validation_fraction = 0.01  # of the documents, chosen by a hash of their text
    data.store = "data/fineweb-edu"  # folder of the token store, used as it is once it is there;
    # "": one in the cache folder, made anew when the source changes
    data.mixture = ""  # several stores by weight instead of that one: "FOLDER=WEIGHT,FOLDER=WEIGHT,…";
    # what is said above of source, tokenizer and store is then not read
    data.packing = "concat"  # of documents into rows: "concat": joined and cut; "best_fit": as few cuts as
    # there can be, and some padding
    data.separate_documents = False  # documents in a row do not see each other
    data.workers = 2  # threads that read batches ahead; 0: none

    config.mesh = mesh = ConfigDict()
    mesh.data = -1  # copies of the model, each with its part of the batch; -1: all devices left over
    mesh.fsdp = 1  # parts that weights and optimiser state are kept in; splits the batch too. With
    # model.remat "dots" or "full" no device ever holds all blocks' weights at one time
    mesh.tensor = 1  # parts of heads, MLP width and vocabulary
    mesh.path = 1  # groups of devices that pgpt's paths are spread over

    config.optimizer = optimizer = ConfigDict()
    optimizer.name = "adamw"  # adamw | lion
    optimizer.learning_rate = 6e-4  # at the end of the warm-up
    optimizer.warmup_steps = 715  # linear, from 0
    optimizer.decay_steps = 19_073  # the step at which the cosine ends; constant from there
    optimizer.final_learning_rate = 6e-5
    optimizer.weight_decay = 0.1  # on matrices only: not on biases, LayerNorms, path weights
    optimizer.beta1 = 0.9
    optimizer.beta2 = 0.95
    optimizer.clip_norm = 1.0  # largest norm of the gradient; 0: no clipping

    config.train = train = ConfigDict()
    train.steps = 19_073  # updates
    train.batch_size = 512  # sequences of context_length tokens in the global batch
    train.microbatches = 8  # parts that a batch is computed in, one after another, in evaluation too: less memory
    train.loss_chunks = 8  # parts of a sequence whose logits exist at one time; divides context_length
    train.seed = 1337  # of weights, data order and dropout: from 0 to 2^32 - 1
    train.log_every = 10  # steps between lines of metrics.jsonl
    train.eval_every = 250  # steps between evaluations
    train.eval_steps = 20  # validation batches an evaluation; 0: the whole validation split
    train.checkpoint_every = 1000  # steps between checkpoints; the last step always has one
    train.keep_checkpoints = 3  # the newest ones that stay
    train.on_nonfinite = "stop"  # if loss or gradient is not finite: "stop" the run, or "skip" the update.
    # A run whose updated weights are not finite always stops
    train.max_nonfinite = 10  # skipped updates in a row after which a run stops all the same
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
