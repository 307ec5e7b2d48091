"""The config fields that all recipes share.

A recipe (`gpt.py`, `pgpt.py`, `lgpt.py`, `cgpt.py`, or your own) starts from this config and changes some fields. In
`--config=configs/pgpt.py:quickstart`, the word after the colon is the size:

- `paper`: the full recipe of arXiv 2404.14462, with 10B tokens of FineWeb-Edu, for GPUs or TPUs.
- `quickstart`: a small model, trained on the source code of Python's standard library. Takes minutes on two CPU cores
  and downloads nothing.
- `tiny`: a smaller model, trained in seconds, for testing a change or a machine.
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
        raise UserError(f"--config: no size {size!r}; choose from {', '.join(SIZES)}")
    config.lock()
    config.model.unlock()  # lets recipes add the fields of their architecture
    return config


def paper() -> ConfigDict:
    config = ConfigDict()

    config.model = model = ConfigDict()
    model.architecture = config_dict.placeholder(str)  # gpt | pgpt | lgpt | cgpt | package.module:Class
    model.vocab_size = 50_304  # rows of the token embedding; must be at least the tokenizer's vocabulary size
    model.context_length = 1024  # positions per sequence
    model.num_layers = 12  # total number of blocks in all paths and stages
    model.num_heads = 12  # attention heads per block; must divide d_model, unless head_dim is set
    model.d_model = 768  # width of the residual stream; in lgpt and cgpt, width of the first stage
    model.num_kv_heads = 0  # key–value heads per block (grouped-query attention); 0: as many as num_heads
    model.head_dim = 0  # width of each head; 0: d_model / num_heads. If set, all stages of lgpt and cgpt use it
    model.qk_norm = False  # apply RMSNorm to each head's queries and keys
    model.attention_windows = ()  # attention window of each block, in positions. 0 or an empty list: full attention.
    # If there are fewer windows than blocks, they are repeated: (256, 0) means 256, 0, 256, 0, …
    model.norm = "layer"  # norm in blocks and before the head: "layer" | "rms"
    model.norm_position = "pre"  # "pre": x + f(norm(x)) | "post": norm(x + f(x)) | "deepnorm": norm(α·x + f(x))
    model.norm_epsilon = 1e-5  # ε of all norms, which is added to the variance
    model.mlp = "dense"  # "dense": act(x·W_up)·W_down | "gated": (act(x·W_gate) ⊙ x·W_up)·W_down |
    # "moe": mixture of experts, which are dense or gated MLPs
    model.mlp_ratio = 4.0  # (width of the MLP's inner layer) / d_model. With "moe": (width of one expert) / d_model
    model.num_experts = 16  # "moe": number of routed experts per block
    model.experts_per_token = 3  # "moe": number of routed experts that each token uses
    model.num_shared_experts = 1  # "moe": number of experts that every token uses
    model.expert_mlp = "dense"  # "moe": kind of MLP of each expert, "dense" | "gated"
    model.expert_scale = 1.0  # "moe": factor on the output of the routed experts; DeepSeek-V3 uses 2.5
    model.expert_bias_rate = 0.001  # "moe": change per step of the biases that balance the routed experts; 0: no biases
    model.balance_loss = 0.0  # "moe": weight of the sequence-wise balance loss; DeepSeek-V3 uses 1e-4; 0: none
    model.grouped_matmul = "auto"  # "moe": backend of the experts' matrix products: auto | ragged (TPU) | blocks
    model.rank_ratio = 0.0  # 0: full matrices. Between 0 and 1: each (m, n) matrix of attention and MLP is the product
    # of two factors, (m, r) and (r, n). The rank is r = ⌊rank_ratio·m·n/(m + n)⌋, at least 1. The factors then have at
    # most rank_ratio·m·n parameters together. Routed experts have full matrices
    model.dropout = 0.0  # dropout rate on the embeddings and on the outputs of attention and MLP
    model.activation = "gelu"  # activation of the MLP: "gelu" (exact) | "gelu_tanh" (GPT-2's) | "silu" | "relu2"
    model.position = "learned"  # position encoding: "learned" | "rope" | "alibi" (only with XLA's attention) | "none".
    # With "learned", no sequence can be longer than context_length, and a trained model keeps its context_length. The
    # other encodings have no such limits (docs/conversion.md)
    model.rope_base = 10_000.0  # base of RoPE's frequencies, base^(−2i/head width)
    model.use_bias = False  # use biases in blocks, including LayerNorms
    model.tie_embeddings = False  # share one matrix between token embedding and head
    model.dtype = "bfloat16"  # dtype of matrix products and activations: float32 | bfloat16; weights are float32
    model.attention = "auto"  # attention backend: auto | flash (TPU) | splash (TPU) | cudnn (NVIDIA) |
    # xla (anywhere)
    model.scan_layers = False  # scan over the blocks: compiles faster, but steps are slower and need more memory
    model.remat = "none"  # rematerialization: the backward pass recomputes nothing ("none") | everything ("full") |
    # everything except products with weights ("dots")

    config.data = data = ConfigDict()
    data.source = "hf:HuggingFaceFW/fineweb-edu:sample-10BT"  # python_stdlib | hf:NAME[:CONFIG] | tfds:NAME |
    # path or glob of .txt, .jsonl or .parquet files. The files may be compressed (.gz, .bz2, .zst) or on gs://. Commas
    # separate several sources
    data.text_endings = ".txt"  # endings of the files in a folder that are read as plain text, such as .txt,.md,.rst.
    # Files of JSON lines and Parquet files are always read; of a glob, all files are read
    data.text_field = "text"  # JSON field or Parquet column that contains the text
    data.invalid_utf8 = "refuse"  # if a file is not valid UTF-8: "refuse" it | "replace" the invalid bytes
    data.invalid_items = "refuse"  # if lines or rows are invalid, too long or lack text_field, or if text files are not
    # UTF-8: "refuse" the source | "skip" them
    data.max_document_bytes = 100_000_000  # a longer JSON line or row is invalid
    data.tokenizer = "gpt2"  # sentencepiece:SIZE | gpt2 | bytes | path of a tokenizer: a SentencePiece model, a
    # tokenizer.json of Hugging Face, or a folder
    data.validation_fraction = 0.01  # fraction of documents for validation, selected by a hash of their text
    data.store = "data/fineweb-edu"  # folder of the token store, local or gs://; an existing store is used unchanged.
    # "": a store in the cache folder, rebuilt when the source changes
    data.mixture = ""  # existing token stores and their weights: "FOLDER=WEIGHT,FOLDER=WEIGHT,…". If set, it
    # replaces the fields source, tokenizer and store
    data.packing = "concat"  # "concat": join all documents and cut the result into rows | "best_fit": put whole
    # documents into rows where they fit; cuts fewer documents, but needs some padding
    data.separate_documents = False  # True: a token attends only to its own document, not to others in the row
    data.workers = 2  # threads that prefetch batches; 0: none

    config.mesh = mesh = ConfigDict()
    mesh.data = -1  # data parallelism: number of replicas of the model; -1: number of devices / (fsdp · tensor · path)
    mesh.fsdp = 1  # FSDP: number of shards of weights, optimizer state and batch. With model.remat "dots" or "full",
    # no device holds the weights of all blocks at the same time
    mesh.tensor = 1  # tensor parallelism: number of shards of heads, MLP width and vocabulary
    mesh.path = 1  # path parallelism: number of shards of pgpt's paths

    config.optimizer = optimizer = ConfigDict()
    optimizer.name = "adamw"  # adamw | lion | muon. With muon, embeddings, head and vectors are still updated by AdamW.
    # Learning rates and weight decay that suit adamw also suit muon (docs/optimizers.md)
    optimizer.learning_rate = 6e-4  # peak learning rate, at the end of the warmup
    optimizer.warmup_steps = 715  # steps of linear warmup from 0
    optimizer.decay_steps = 19_073  # step at which the cosine decay ends
    optimizer.final_learning_rate = 6e-5  # learning rate from decay_steps on
    optimizer.weight_decay = 0.1  # applies to matrices, but not to biases, norms or path weights
    optimizer.beta1 = 0.9  # AdamW: decay rate of the first moment. Lion: weight of the momentum in the update
    optimizer.beta2 = 0.95  # AdamW: decay rate of the second moment. Lion: decay rate of the momentum
    optimizer.clip_norm = 1.0  # maximum norm of the gradient; 0: no clipping

    config.train = train = ConfigDict()
    train.steps = 19_073  # number of training steps
    train.batch_size = 512  # sequences per step, over all devices
    train.microbatches = 8  # each batch is split into this many parts, computed one after another, also in evaluation
    train.loss_chunks = 4  # each sequence is split into this many parts; their logits are computed one after another.
    # Must divide context_length
    train.z_loss = 0.0  # weight of the z-loss, which is the mean of (log Σ exp(logits))²; 0: no z-loss. A common
    # weight is 1e-4. The z-loss is added in training, but not in evaluation
    train.teacher = ""  # workdir of a trained model of the same architecture and sizes; "": none. With a teacher, the
    # distance between the outputs of both models' blocks is added to the training loss (docs/conversion.md)
    train.teacher_step = -1  # step of the teacher's checkpoint; -1: the newest one when the run starts
    train.feature_weight = 0.1  # weight of the distance to the teacher's features
    train.seed = 1337  # seed of weights, data order and dropout; 0 to 2^32 - 1
    train.log_every = 10  # steps between log lines
    train.eval_every = 250  # steps between evaluations
    train.eval_steps = 20  # batches per evaluation; 0: the whole validation split
    train.checkpoint_every = 1000  # steps between checkpoints; the last step is always saved
    train.keep_checkpoints = 3  # number of newest checkpoints to keep
    train.on_nonfinite = "stop"  # if the loss or the gradient is not finite: "stop" the run | "skip" the update.
    # Non-finite weights always stop the run
    train.max_nonfinite = 10  # with "skip": the run stops after this number of consecutive non-finite updates
    train.tracker = ""  # experiment tracker that also gets the metrics: "" (none) | "wandb" | "trackio"
    train.profile_from = 0  # first step of a trace for xprof; 0: no trace. The first steps after a start or
    # resumption are not typical
    train.profile_steps = 5  # number of steps in the trace
    train.stall_seconds = 1800.0  # if no step finishes for this time, the run ends with status 124; 0: no limit. The
    # time of compiling, saving and evaluating does not count
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
