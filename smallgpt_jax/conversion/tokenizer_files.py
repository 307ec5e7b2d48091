"""Our tokenizers in the form that Hugging Face's libraries read, `tokenizer.json`; the ids are the same."""

import json

from smallgpt_jax.data.tokenizers import END_OF_TEXT, Tokenizer, gpt2_bytes
from smallgpt_jax.errors import UserError

SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # how SentencePiece writes one
# What a tokenizer.json is compared on before it is given away.
PROBES = [
    "Hello world, it's 3.14159!  Two  spaces, a\ttab\nand\n\nlines \n", "  leading and trailing  ",
    "def f(x):\n    return {'a': [x ** 2, -1]}  # code\n", "Grüße, naïve café, Ὅμηρος, Привет, こんにちは世界, 你好",
    "emoji 🙂👩‍👩‍👧 and math ∑∫√ and \x00\x01 control", "aaaaaaaaaaaaaaaaaaaa 1111111111 ---------- ______",
    f"the mark {END_OF_TEXT} as text, and {SPACE}{SPACE} too", "ﬁne Ｆｕｌｌ width, Å and Å, half\u00a0space", ""]


def files(tokenizer: Tokenizer, context_length: int) -> dict[str, str]:
    """File name → content.

    Raises UserError if the `tokenizers` library cannot do what the tokenizer does; any text is text,
    also what spells the end-of-text mark.
    """
    try:
        import tokenizers as library
    except ImportError:
        raise UserError("this needs more libraries: pip install -e '.[hf]'") from None
    made, mark = {"bytes": of_bytes, "gpt2": of_gpt2, "sentencepiece": of_sentencepiece}[tokenizer.kind](
        library, tokenizer)
    made.add_special_tokens([library.AddedToken(mark, special=True, normalized=False)])
    made.encode_special_tokens = True
    for text in PROBES:
        theirs, ours = made.encode(text, add_special_tokens=False).ids, tokenizer.encode([text])[0].tolist()
        if theirs != ours:
            raise UserError(
                f"this {tokenizer.kind} tokenizer cannot be written as a tokenizer.json: of {text[:20]!r} it "
                f"would make {theirs[:5]}…, not {ours[:5]}…. (The libraries' ways to split and normalise text "
                "differ.) --tokenizer=skip leaves it out")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": mark, "eos_token": mark, "pad_token": mark,
        "unk_token": None, "model_max_length": context_length, "padding_side": "left",
        "clean_up_tokenization_spaces": False, "split_special_tokens": True}
    return {"tokenizer.json": made.to_str(), "tokenizer_config.json": json.dumps(settings, indent=2) + "\n"}


def of_bytes(library, tokenizer: Tokenizer):
    vocabulary = {character: byte for character, byte in gpt2_bytes().items()} | {
        END_OF_TEXT: tokenizer.end_of_text}
    return byte_level(library, vocabulary, [], use_regex=False), END_OF_TEXT


def of_gpt2(library, tokenizer: Tokenizer):
    files = tokenizer.files()
    merges = [tuple(line.split(" ")) for line in files["merges.txt"].decode().splitlines()
              if not line.startswith("#version") and line]
    return byte_level(library, json.loads(files["vocab.json"]), merges, use_regex=True), END_OF_TEXT


def byte_level(library, vocabulary: dict, merges: list, use_regex: bool):
    made = library.Tokenizer(library.models.BPE(vocabulary, merges))
    made.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)
    made.decoder = library.decoders.ByteLevel()
    return made


def of_sentencepiece(library, tokenizer: Tokenizer):
    from sentencepiece import sentencepiece_model_pb2

    spec = sentencepiece_model_pb2.ModelProto.FromString(tokenizer.files()["tokenizer.model"])
    pieces, normal = [piece.piece for piece in spec.pieces], sentencepiece_model_pb2.ModelProto.SentencePiece.NORMAL
    unknown = pieces[tokenizer.unknown]
    if spec.trainer_spec.model_type == sentencepiece_model_pb2.TrainerSpec.UNIGRAM:
        model = library.models.Unigram(
            [(piece.piece, piece.score) for piece in spec.pieces], unk_id=tokenizer.unknown,
            byte_fallback=spec.trainer_spec.byte_fallback)
    else:
        ids = {piece: i for i, piece in enumerate(pieces)}
        mergeable = {piece.piece: piece.score for piece in spec.pieces if piece.type == normal}
        model = library.models.BPE(ids, merges(mergeable), unk_token=unknown, fuse_unk=True,
                                   byte_fallback=spec.trainer_spec.byte_fallback)
    made = library.Tokenizer(model)
    rules = spec.normalizer_spec
    steps = []
    if rules.precompiled_charsmap:
        steps.append(library.normalizers.Precompiled(rules.precompiled_charsmap))
    if rules.remove_extra_whitespaces:
        steps += [library.normalizers.Strip(), library.normalizers.Replace(library.Regex(" {2,}"), " ")]
    if rules.add_dummy_prefix:
        steps.append(library.normalizers.Prepend(SPACE))
    made.normalizer = library.normalizers.Sequence([*steps, library.normalizers.Replace(" ", SPACE)])
    made.decoder = library.decoders.Sequence([
        library.decoders.Replace(SPACE, " "), library.decoders.ByteFallback(), library.decoders.Fuse(),
        *([library.decoders.Strip(" ", 1, 0)] if rules.add_dummy_prefix else [])])
    return made, pieces[tokenizer.end_of_text]


def merges(scores: dict[str, float]) -> list[tuple[str, str]]:
    """The merges of a byte-pair model that SentencePiece describes by the scores of their results."""
    found = []
    for piece, score in scores.items():
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in scores and right in scores:
                found.append((-score, left, right))
    return [(left, right) for _, left, right in sorted(found, key=lambda merge: merge[0])]
