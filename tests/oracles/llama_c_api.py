"""The C interface of llama.cpp, as exported by the extension module of the `xllamacpp` wheel.

The wheel's Python classes give one position's log-probabilities per request; the C functions inside the same
shared object give the logits of every position of a batch at once, and quantise rows to every tensor type.
The structures follow `llama.h` of that wheel; `library()` checks the defaults they are filled with, so that
a wheel with another layout is refused instead of misread.
"""

import ctypes
import functools
import importlib

Pointer = ctypes.c_void_p

_LogCallback = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)


# Receives llama.cpp's log lines; tests print none of them. Kept alive as long as the library.
_discard = _LogCallback(lambda level, text, data: None)


class KeyOverride(ctypes.Structure):
    """`llama_model_kv_override` of a text: what the file is taken to say under `key`. A list ends with an empty key."""

    TEXT = 3
    _fields_ = (
        ("tag", ctypes.c_int),
        ("key", ctypes.c_char * 128),
        ("_gap", ctypes.c_int),
        ("text", ctypes.c_char * 128),
    )


class ModelParams(ctypes.Structure):
    """`llama_model_params`. The tail leaves room for fields that a later wheel may append."""

    _fields_ = (
        ("devices", Pointer),
        ("tensor_buft_overrides", Pointer),
        ("n_gpu_layers", ctypes.c_int32),
        ("split_mode", ctypes.c_int),
        ("load_mode", ctypes.c_int),
        ("lazy_mode", ctypes.c_int),
        ("main_gpu", ctypes.c_int32),
        ("tensor_split", Pointer),
        ("progress_callback", Pointer),
        ("progress_callback_user_data", Pointer),
        ("kv_overrides", Pointer),
        ("vocab_only", ctypes.c_bool),
        ("check_tensors", ctypes.c_bool),
        ("use_extra_bufts", ctypes.c_bool),
        ("no_host", ctypes.c_bool),
        ("no_alloc", ctypes.c_bool),
        ("load_mtp", ctypes.c_bool),
        ("_tail", ctypes.c_uint8 * 64),
    )


class ContextParams(ctypes.Structure):
    """`llama_context_params`. The tail leaves room for fields that a later wheel may append."""

    _fields_ = (
        ("n_ctx", ctypes.c_uint32),
        ("n_batch", ctypes.c_uint32),
        ("n_ubatch", ctypes.c_uint32),
        ("n_seq_max", ctypes.c_uint32),
        ("n_rs_seq", ctypes.c_uint32),
        ("n_outputs_max", ctypes.c_uint32),
        ("n_outputs_max_per_seq", ctypes.c_uint32),
        ("n_threads", ctypes.c_int32),
        ("n_threads_batch", ctypes.c_int32),
        ("ctx_type", ctypes.c_int),
        ("rope_scaling_type", ctypes.c_int),
        ("pooling_type", ctypes.c_int),
        ("attention_type", ctypes.c_int),
        ("flash_attn_type", ctypes.c_int),
        ("rope_freq_base", ctypes.c_float),
        ("rope_freq_scale", ctypes.c_float),
        ("yarn_ext_factor", ctypes.c_float),
        ("yarn_attn_factor", ctypes.c_float),
        ("yarn_beta_fast", ctypes.c_float),
        ("yarn_beta_slow", ctypes.c_float),
        ("yarn_orig_ctx", ctypes.c_uint32),
        ("defrag_thold", ctypes.c_float),
        ("cb_eval", Pointer),
        ("cb_eval_user_data", Pointer),
        ("type_k", ctypes.c_int),
        ("type_v", ctypes.c_int),
        ("moe_cache_size", ctypes.c_size_t),
        ("abort_callback", Pointer),
        ("abort_callback_data", Pointer),
        ("embeddings", ctypes.c_bool),
        ("offload_kqv", ctypes.c_bool),
        ("no_perf", ctypes.c_bool),
        ("op_offload", ctypes.c_bool),
        ("swa_full", ctypes.c_bool),
        ("kv_unified", ctypes.c_bool),
        ("samplers", Pointer),
        ("n_samplers", ctypes.c_size_t),
        ("ctx_other", Pointer),
        ("_tail", ctypes.c_uint8 * 64),
    )


class Batch(ctypes.Structure):
    """`llama_batch`."""

    _fields_ = (
        ("n_tokens", ctypes.c_int32),
        ("token", ctypes.POINTER(ctypes.c_int32)),
        ("embd", ctypes.POINTER(ctypes.c_float)),
        ("pos", ctypes.POINTER(ctypes.c_int32)),
        ("n_seq_id", ctypes.POINTER(ctypes.c_int32)),
        ("seq_id", ctypes.POINTER(ctypes.POINTER(ctypes.c_int32))),
        ("logits", ctypes.POINTER(ctypes.c_int8)),
    )


_SIGNATURES: dict[str, tuple[object, list[object]]] = {
    "llama_backend_init": (None, []),
    "llama_log_set": (None, [_LogCallback, Pointer]),
    "llama_model_default_params": (ModelParams, []),
    "llama_context_default_params": (ContextParams, []),
    "llama_model_load_from_file": (Pointer, [ctypes.c_char_p, ModelParams]),
    "llama_model_free": (None, [Pointer]),
    "llama_model_get_vocab": (Pointer, [Pointer]),
    "llama_init_from_model": (Pointer, [Pointer, ContextParams]),
    "llama_free": (None, [Pointer]),
    "llama_get_memory": (Pointer, [Pointer]),
    "llama_memory_clear": (None, [Pointer, ctypes.c_bool]),
    "llama_batch_init": (Batch, [ctypes.c_int32, ctypes.c_int32, ctypes.c_int32]),
    "llama_batch_free": (None, [Batch]),
    "llama_decode": (ctypes.c_int32, [Pointer, Batch]),
    "llama_get_logits_ith": (ctypes.POINTER(ctypes.c_float), [Pointer, ctypes.c_int32]),
    "llama_vocab_n_tokens": (ctypes.c_int32, [Pointer]),
    "llama_vocab_is_eog": (ctypes.c_bool, [Pointer, ctypes.c_int32]),
    "llama_tokenize": (
        ctypes.c_int32,
        [
            Pointer,
            ctypes.c_char_p,
            ctypes.c_int32,
            ctypes.POINTER(ctypes.c_int32),
            ctypes.c_int32,
            ctypes.c_bool,
            ctypes.c_bool,
        ],
    ),
    "llama_token_to_piece": (
        ctypes.c_int32,
        [Pointer, ctypes.c_int32, ctypes.c_char_p, ctypes.c_int32, ctypes.c_int32, ctypes.c_bool],
    ),
    "ggml_quantize_requires_imatrix": (ctypes.c_bool, [ctypes.c_int]),
    "ggml_quantize_chunk": (
        ctypes.c_size_t,
        [ctypes.c_int, Pointer, Pointer, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, Pointer],
    ),
}


@functools.cache
def library() -> ctypes.CDLL:
    """The shared object, initialised and silent.

    Raises `RuntimeError` when this wheel's structures do not have the layout declared here.
    """
    extension = importlib.import_module("xllamacpp.xllamacpp")
    lib = ctypes.CDLL(extension.__file__)
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(lib, name)
        function.restype, function.argtypes = result, arguments
    model, context = lib.llama_model_default_params(), lib.llama_context_default_params()
    found = (
        (model.use_extra_bufts, model.vocab_only, model.check_tensors),
        (context.n_ctx, context.n_batch, context.n_ubatch, context.n_seq_max, context.flash_attn_type),
        (context.type_k, context.type_v, context.yarn_ext_factor, context.offload_kqv, context.embeddings),
    )
    wanted = ((True, False, False), (512, 2048, 512, 1, -1), (1, 1, -1.0, True, False))
    if found != wanted:
        raise RuntimeError(
            f"{extension.__file__}: the default parameters read {found}, wanted {wanted}; its llama.h has "
            "another layout, so bring the structures in tests/oracles/llama_c_api.py up to date with it"
        )
    lib.llama_log_set(_discard, None)
    lib.llama_backend_init()
    return lib
