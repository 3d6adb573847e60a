"""Texts continued: the tokens a naive loop would give, whatever stands beside them."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from generation_cases import variant
from model_cases import AXES, automatic_mesh
from small_model import QUICK, filled

from coat_jax.errors import UserError
from coat_jax.generation import continuation, decode, prefill
from coat_jax.generation.continuation import CHUNK, generate, stream
from coat_jax.generation.sampling import Sampling

MODEL = filled(variant())
GREEDY = Sampling(temperature=0)
PROMPTS = [list(range(3, 12)), [7], list(b"a text of 20 letters")]


@functools.partial(jax.jit, compiler_options=QUICK)
def forward(state, tokens):
    return nnx.merge(nnx.graphdef(MODEL), state)(tokens)[0]


def naive(prompt, count):
    """The likeliest token, again and again, by the training forward."""
    state, text = nnx.state(MODEL), list(prompt)
    for _ in range(count):
        # Filled up behind, where no token of the text looks: one program for all lengths.
        tokens = np.zeros((1, 48), np.int32)
        tokens[0, : len(text)] = text
        text.append(int(np.argmax(forward(state, tokens)[len(text) - 1])))
    return text[len(prompt) :]


def test_greedy_tokens_are_those_of_a_loop_over_the_training_forward():
    wanted = [naive(prompt, 20) for prompt in PROMPTS]
    assert generate(MODEL, PROMPTS, max_tokens=20, sampling=GREEDY) == wanted
    assert len({tuple(text) for text in wanted}) == 3


def test_tokens_are_chosen_with_a_cache_of_the_format():
    """In INT4 they are others than without."""
    graph, state = nnx.split(MODEL)
    (prompt, *_), count = PROMPTS, 20

    @functools.partial(jax.jit, compiler_options=QUICK)
    def likeliest(state, tokens, starts):
        model = nnx.merge(graph, state)
        logits, past = prefill(model, tokens, starts, 64, cache="int4")

        def step(carry, _):
            new, past = carry
            logits, past = decode(model, new, past)
            return (jnp.argmax(logits, -1), past), new

        return jax.lax.scan(step, (jnp.argmax(logits, -1), past), length=count)[1]

    wanted = likeliest(state, np.array([prompt]), np.array([0]))[:, 0].tolist()
    settings = {"max_tokens": count, "sampling": GREEDY}
    assert generate(MODEL, [prompt], **settings, cache="int4") == [wanted]
    assert generate(MODEL, [prompt], **settings) != [wanted]


def test_a_text_does_not_depend_on_those_beside_it():
    settings = {"max_tokens": 20, "sampling": Sampling(temperature=2)}
    together = generate(MODEL, PROMPTS, **settings)
    for number in (0, 2):
        (alone,) = generate(MODEL, [PROMPTS[number]], first=number, **settings)
        assert alone == together[number]


def test_tokens_come_in_chunks_and_the_first_one_at_once():
    chunks = list(stream(MODEL, PROMPTS, max_tokens=CHUNK + 4, sampling=GREEDY))
    assert [[len(text) for text in new] for new in chunks] == [[1] * 3, [CHUNK] * 3, [3] * 3]
    (one,) = stream(MODEL, PROMPTS, max_tokens=1, sampling=GREEDY)
    assert one == chunks[0]


def test_a_stop_token_ends_its_text_and_is_left_out():
    """When all texts have ended, nothing more comes."""
    settings = {"max_tokens": 20, "sampling": GREEDY}
    wanted = generate(MODEL, PROMPTS, **settings)
    stops = [wanted[0][4], 254, 255]
    cut = [[*text, stops[0]] for text in wanted]
    cut = [text[: next(i for i, token in enumerate(text) if token in stops)] for text in cut]
    assert len(cut[0]) <= 4 < max(map(len, cut))
    assert generate(MODEL, PROMPTS, **settings, stops=stops) == cut
    stops = [text[2] for text in wanted]
    assert len(list(stream(MODEL, PROMPTS, **settings, stops=stops))) <= 2


def test_a_text_ends_where_the_context_does():
    room = MODEL.config.context
    prompts = [[5] * (room - 3), [6] * 10]
    short, long = generate(MODEL, prompts, max_tokens=1000, sampling=GREEDY)
    assert (len(short), len(long)) == (3, room - 10)
    assert long == naive(prompts[1], 20) + long[20:]


def test_lengths_of_prompts_share_programs():
    """Prompts of 1 to 32 tokens share two first programs, and one cache of 64 slots."""
    config = variant(context=128)
    model = filled(dataclasses.replace(config, layers=1))
    begun, continued = continuation._begin._cache_size(), continuation._continue._cache_size()
    for length, max_tokens in ((1, 9), (2, 20), (16, 48), (17, 9), (25, 32), (32, 10)):
        generate(model, [[1] * length], max_tokens=max_tokens, sampling=GREEDY)
    assert continuation._begin._cache_size() - begun == 2
    assert continuation._continue._cache_size() - continued == 1


def test_on_a_mesh_the_texts_are_the_same():
    """Three prompts on 4 devices that cut the batch: one row is filled up."""
    wanted = generate(MODEL, PROMPTS, max_tokens=20, sampling=GREEDY)
    mesh = automatic_mesh(2, 2, 2)
    with jax.set_mesh(mesh):
        got = generate(filled(variant(**AXES), mesh=mesh), PROMPTS, max_tokens=20, sampling=GREEDY)
    assert got == wanted


@pytest.mark.parametrize(("lost", "sampling"), [(jnp.nan, GREEDY), (jnp.inf, Sampling())])
def test_logits_that_are_not_numbers_are_an_error(lost, sampling):
    """Whatever token is chosen of them, it is no stop token that ends the text."""
    model = filled(MODEL.config)
    model.norm.scale[...] = model.norm.scale[...].at[0].set(lost)
    with pytest.raises(ValueError, match="logits are not numbers: its parameters are damaged"):
        generate(model, PROMPTS, max_tokens=3, sampling=sampling, stops=range(256))


def test_prompts_may_be_arrays_and_numbers_those_of_numpy():
    prompts = np.arange(60).reshape(3, 20)
    wanted = generate(MODEL, prompts.tolist(), max_tokens=3, sampling=GREEDY)
    for given in (prompts, jnp.asarray(prompts)):
        assert generate(MODEL, given, max_tokens=np.uint8(3), sampling=GREEDY) == wanted


NO_TOKENS = r"The prompt has .* for tokens: a text is a list of whole"


@pytest.mark.parametrize(
    ("prompts", "changes", "message"),
    [
        ([], {}, "There is no prompt"),
        ([[1], []], {}, "Prompt 2 has 0 tokens, and must have from 1 to 63"),
        ([[1] * 64], {}, "The prompt has 64 tokens, .* the model's context=64 must"),
        ([[1, 256]], {}, "The prompt has token 256, outside the model's vocabulary of 256"),
        ([[-1]], {}, "token -1, outside"),
        ([[1]], {"max_tokens": 0}, "max_tokens=0 must be a whole number from 1 to 2,147,483,647"),
        ([[1]], {"stops": [None]}, "stops has object of shape"),
        ([[1]], {"stops": [2**40]}, "stops has token 1099511627776, outside"),
        ([[1]], {"images": [[]]}, "This model sees no images"),
        ([[1]], {"cache": "int5"}, "cache='int5' must be one of"),
        *(([prompt], {}, NO_TOKENS) for prompt in ([1.5], [True], [[1]], [None], "text")),
    ],
)
def test_prompts_that_cannot_be_continued_are_refused_at_once(prompts, changes, message):
    with pytest.raises((UserError, TypeError), match=message):
        stream(MODEL, prompts, **{"max_tokens": 5, **changes})


def test_logits_do_not_matter_once_a_text_has_ended():
    starts = jnp.zeros(2, jnp.int32)
    cache = continuation.Cache(None, starts, jnp.int32(3))
    session = continuation._Session(cache, starts, jnp.array([0, 5]), starts)
    logits = jnp.zeros((2, 256)).at[0].set(jnp.nan).at[1, 7].set(1.0)
    new, session = continuation._choose_next(GREEDY, jnp.array([], jnp.int32), logits, session)
    np.testing.assert_array_equal(new, [continuation.NOTHING, 7])
    np.testing.assert_array_equal(session.remaining, [0, 4])
