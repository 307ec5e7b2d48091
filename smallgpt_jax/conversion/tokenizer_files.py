"""Exports tokenizers as Hugging Face's `tokenizer.json`. The token ids stay the same."""

import json

from smallgpt_jax.data.config import SYMBOLS
from smallgpt_jax.data.hugging_face_tokenizer import HuggingFaceTokenizer
from smallgpt_jax.data.special_tokens import END_OF_TEXT
from smallgpt_jax.data.tokenizer_folder import TRIAL_TEXTS
from smallgpt_jax.data.tokenizers import SPACE, Tokenizer, gpt2_bytes
from smallgpt_jax.errors import UserError, import_library

# Ends the names of user-defined pieces, so that the normalizer prepends no space to them as it does
# to texts, and removes this character. A Unicode noncharacter, which texts do not contain.
_NO_SPACE = "\ufdd1"
_BEGINNING = rf"\A(?=[\s\S])(?![\s\S]*{_NO_SPACE}\z)"  # of a text that is not empty


def hugging_face_files(
    tokenizer: Tokenizer, context_length: int, is_chat: bool = False
) -> dict[str, str]:
    """Returns {file name: content}. Exported tokenizers encode `<|endoftext|>` in a text as
    ordinary text; those of chat models as the special token, because transformers encodes what a
    template writes like any text.
    """
    if isinstance(tokenizer, HuggingFaceTokenizer):
        if "tokenizer_config.json" in tokenizer.files():
            return {}
        tokens = tokenizer.begin_of_text_token, tokenizer.end_of_text_token
        return {"tokenizer_config.json": _settings(*tokens, context_length, is_chat)}
    if tokenizer.kind == SYMBOLS:
        raise UserError(
            "the symbols of a probe cannot be exported as a tokenizer; use --tokenizer=skip to "
            "export without it"
        )
    library = import_library("tokenizers")
    build = _sentencepiece_tokenizer if tokenizer.kind == "sentencepiece" else _byte_level_tokenizer
    converted, end_of_text = build(library, tokenizer)
    begin_of_text = converted.id_to_token(tokenizer.begin_of_text)
    converted.add_special_tokens(
        [
            library.AddedToken(token, special=True, normalized=False)
            for token in dict.fromkeys((end_of_text, begin_of_text))  # often the same
        ]
    )
    converted.encode_special_tokens = True
    # The two libraries' algorithms differ in details, so a converted tokenizer is tried.
    for text in [*TRIAL_TEXTS, *_probes_of_pieces(tokenizer)]:
        theirs = converted.encode(text, add_special_tokens=False).ids
        ours = tokenizer.encode([text])[0].tolist()
        if theirs != ours:
            raise UserError(
                f"this {tokenizer.kind} tokenizer cannot be exported, because the tokenizer.json "
                f"would encode {text[:20]!r} as {theirs[:5]}… instead of {ours[:5]}… (the "
                "libraries split and normalize text differently); use --tokenizer=skip to export "
                "without it"
            )
    more = {}
    if tokenizer.kind == "sentencepiece":  # llama.cpp's converter reads this setting
        more["add_prefix_space"] = sentencepiece_spec(tokenizer).normalizer_spec.add_dummy_prefix
    if begin_of_text == end_of_text:
        # llama.cpp would otherwise put it before a text; transformers does not
        more["add_bos_token"] = False
    else:
        converted.post_processor = library.processors.TemplateProcessing(
            single=f"{begin_of_text} $A", special_tokens=[(begin_of_text, tokenizer.begin_of_text)]
        )
    return {
        "tokenizer.json": converted.to_str(),
        "tokenizer_config.json": _settings(
            begin_of_text, end_of_text, context_length, is_chat, **more
        ),
    }


def _settings(
    begin_of_text: str, end_of_text: str, context_length: int, is_chat: bool, **more
) -> str:
    content = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": begin_of_text,
        "eos_token": end_of_text,
        "pad_token": end_of_text,
        "unk_token": None,
        "model_max_length": context_length,
        "padding_side": "left",  # new tokens are generated on the right
        "clean_up_tokenization_spaces": False,
        "split_special_tokens": not is_chat,
        **more,
    }
    return json.dumps(content, indent=2) + "\n"


def _byte_level_tokenizer(library, tokenizer: Tokenizer):
    ids, merges = byte_pairs(tokenizer)
    pairs = [tuple(merge.split(" ")) for merge in merges]
    converted = library.Tokenizer(library.models.BPE(ids, pairs))
    converted.pre_tokenizer = library.pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=tokenizer.kind == "gpt2"
    )
    converted.decoder = library.decoders.ByteLevel()
    return converted, END_OF_TEXT


def byte_pairs(tokenizer: Tokenizer) -> tuple[dict[str, int], list[str]]:
    """Returns {token in GPT-2's characters for bytes: id}, and the merges, such as "t h"."""
    if tokenizer.kind == "bytes":
        return {**gpt2_bytes(), END_OF_TEXT: tokenizer.end_of_text}, []
    files = tokenizer.files()
    lines = files["merges.txt"].decode().splitlines()
    merges = [line for line in lines if line and not line.startswith("#version")]
    return json.loads(files["vocab.json"]), merges


def _sentencepiece_tokenizer(library, tokenizer: Tokenizer):
    spec = sentencepiece_spec(tokenizer)
    rules = spec.normalizer_spec
    user_defined = _user_defined(tokenizer)
    names = [piece.piece for piece in spec.pieces]
    if rules.add_dummy_prefix:
        for i in user_defined:
            names[i] += _NO_SPACE
    converted = library.Tokenizer(_sentencepiece_model(library, spec, names, tokenizer.unknown))
    converted.normalizer = _normalizer(library, rules, bool(user_defined))
    for i in user_defined:
        # Others, such as two spaces, are in no normalized text.
        if converted.normalizer.normalize_str(names[i]) == spec.pieces[i].piece:
            converted.add_tokens([library.AddedToken(names[i], special=False, normalized=True)])
    converted.decoder = _decoder(library, rules, bool(user_defined))
    return converted, names[tokenizer.end_of_text]


def _sentencepiece_model(library, spec, names: list[str], unknown: int):
    """`names` are those of the pieces, `unknown` is the id of the piece for unknown characters."""
    from sentencepiece import sentencepiece_model_pb2

    byte_fallback = spec.trainer_spec.byte_fallback
    if spec.trainer_spec.model_type == sentencepiece_model_pb2.TrainerSpec.UNIGRAM:
        vocabulary = [(name, piece.score) for name, piece in zip(names, spec.pieces)]
        return library.models.Unigram(vocabulary, unk_id=unknown, byte_fallback=byte_fallback)
    normal = sentencepiece_model_pb2.ModelProto.SentencePiece.NORMAL
    mergeable = {piece.piece: piece.score for piece in spec.pieces if piece.type == normal}
    return library.models.BPE(
        {name: i for i, name in enumerate(names)},
        _merges(mergeable),
        unk_token=names[unknown],
        fuse_unk=True,
        byte_fallback=byte_fallback,
    )


def _normalizer(library, rules, has_user_defined: bool):
    """Returns SentencePiece's normalization of a text. `rules` is the NormalizerSpec."""
    steps = []
    if rules.precompiled_charsmap:
        steps.append(library.normalizers.Precompiled(rules.precompiled_charsmap))
    if rules.remove_extra_whitespaces:
        steps += [
            library.normalizers.Strip(),
            library.normalizers.Replace(library.Regex(" {2,}"), " "),
        ]
    if rules.add_dummy_prefix and has_user_defined:  # no space before their names, see _NO_SPACE
        steps += [
            library.normalizers.Replace(library.Regex(_BEGINNING), SPACE),
            library.normalizers.Replace(_NO_SPACE, ""),
        ]
    elif rules.add_dummy_prefix:
        steps.append(library.normalizers.Prepend(SPACE))
    steps.append(library.normalizers.Replace(" ", SPACE))
    return library.normalizers.Sequence(steps)


def _decoder(library, rules, has_user_defined: bool):
    steps = [
        library.decoders.Replace(SPACE, " "),
        library.decoders.ByteFallback(),
        library.decoders.Fuse(),
    ]
    if has_user_defined:
        steps.insert(0, library.decoders.Replace(_NO_SPACE, ""))
    if rules.add_dummy_prefix:
        steps.append(library.decoders.Strip(" ", 1, 0))
    return library.decoders.Sequence(steps)


def _user_defined(tokenizer: Tokenizer) -> list[int]:
    """Returns the ids of the pieces of which SentencePiece makes a token wherever they are."""
    from sentencepiece import sentencepiece_model_pb2

    kind = sentencepiece_model_pb2.ModelProto.SentencePiece.USER_DEFINED
    pieces = sentencepiece_spec(tokenizer).pieces
    return [i for i, piece in enumerate(pieces) if piece.type == kind]


def _probes_of_pieces(tokenizer: Tokenizer) -> list[str]:
    """Returns texts with each user-defined piece, for the comparison with the original."""
    if tokenizer.kind != "sentencepiece":
        return []
    pieces = sentencepiece_spec(tokenizer).pieces
    names = [pieces[i].piece.replace(SPACE, " ") for i in _user_defined(tokenizer)]
    # between others, at both ends, and overlapping with the piece's own first or last character
    forms = ("{0}", " {0}", "a{0}b", "a {0} b", "{0}{0}a\n{0}", "  {0}  ", "{1}{0}", "{0}{2}")
    return [form.format(name, name[0], name[-1]) for name in names for form in forms]


def sentencepiece_spec(tokenizer: Tokenizer):
    from sentencepiece import sentencepiece_model_pb2

    return sentencepiece_model_pb2.ModelProto.FromString(tokenizer.files()["tokenizer.model"])


def _merges(scores: dict[str, float]) -> list[tuple[str, str]]:
    # SentencePiece stores scores of pieces, but no merges. A split of a piece in two is a merge
    # with its score.
    splits = []
    for piece, score in scores.items():
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in scores and right in scores:
                splits.append((score, left, right))
    splits.sort(key=lambda split: -split[0])
    return [(left, right) for _, left, right in splits]
