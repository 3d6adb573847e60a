"""How a run is optimized: AdamW in 8 bits or FP32, or any transformation of optax."""

import dataclasses
from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeAlias, TypeGuard

import optax

from coat_jax.errors import UserError
from coat_jax.optax.arguments import least_b2
from coat_jax.optax.rounding import RoundParams
from coat_jax.validation import Between, CountOrZero, Share, brief, require_fields

OptimizerName = Literal["fp8_adamw", "adamw"]
Moments = Literal["directions", "expanded", "paper"]
ScheduleName = Literal["cosine", "linear", "wsd", "constant"]
DecayRate = Annotated[float, Between(least=0, below=1)]
StepsOrShare = CountOrZero | Share  # 100 is a hundred steps, 0.1 a tenth of the run
# One of optax, or a function that makes one from the learning rate's schedule.
Transformation: TypeAlias = optax.GradientTransformation | Callable[[optax.Schedule], Any]

# The fields that apply to the named optimizers only.
OF_ADAMW: tuple[str, ...] = ("name", "moments", "b1", "b2", "eps", "weight_decay")
OF_ADAMW += ("decay_embedding", "decay_vectors")
# Those that apply only if the optimizer is made from the schedule.
OF_SCHEDULE = ("learning_rate", "schedule", "warmup_steps", "decay_steps", "final_ratio")
# Those that need an optimizer which updates each parameter by itself.
IN_PARTS = ("release_gradients", "offload")


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The optimizer, its learning rate over the run, and what surrounds it.

        OptimizerConfig(
            transformation=lambda schedule: coat.optax.compress(optax.lion(schedule, b2=0.98)),
            learning_rate=1e-4,
        )

    Attributes:
        name: "fp8_adamw" stores the moments in 8 bits and steps in one pass; "adamw" is optax's,
            with moments in FP32.
        transformation: any optax transformation instead, or a function that makes one from the
            learning rate's schedule; only in a config file. The fields name and moments, and those
            from b1 to decay_vectors, then cannot be set: the transformation has its own. Nor, if
            it is not made by a function, can those from learning_rate to final_ratio.
        moments: the formats of "fp8_adamw": "directions" stores m / sqrt(v) and the logarithm of v;
            "expanded" stores m and v in FP8 with dynamic range expansion, and "paper" also
            rounds them to nearest, as the COAT paper does.
        learning_rate: the highest learning rate, reached at the end of the warmup.
        schedule: how the learning rate falls after the warmup: "cosine" or "linear"; "wsd" (warmup,
            stable, decay) is constant until the last steps; "constant" never falls.
        warmup_steps: steps in which the learning rate rises linearly; a number with a decimal
            point is a share of the run: 100 is a hundred steps, 0.1 a tenth of the run.
        decay_steps: the last steps of "wsd", in which the learning rate falls linearly; a number
            of steps, or a share of the run.
        final_ratio: the learning rate at the end of the schedule, divided by learning_rate; one
            more step after the last would have this rate.
        b1: decay rate of the first moment.
        b2: decay rate of the second moment.
        eps: a number that is added to the root of the second moment.
        weight_decay: the weight decay, decoupled from the gradient and multiplied by the learning
            rate.
        decay_embedding: whether weight decay applies to the embedding, which may also be the head.
        decay_vectors: whether weight decay applies to biases and to the scales of norms.
        clip_norm: the largest global norm of the gradients; None does not clip.
        round_params: how BF16 parameters are rounded: "stochastic" preserves small updates on
            average, "nearest" loses them, and "24_bits" stores 8 more bits in the optimizer's
            state.
        release_gradients: whether the backward pass updates each layer as soon as it has its
            gradients, and frees them. They are then clipped by the norm of the step before.
        offload: whether the large arrays of the optimizer's state are in host memory. Each step
            moves them to the device and back, a part at a time.
    """

    name: OptimizerName = "fp8_adamw"
    transformation: Transformation | None = None
    moments: Moments = "directions"
    learning_rate: Annotated[float, Between(above=0, most=10)] = 3e-4
    schedule: ScheduleName = "cosine"
    warmup_steps: StepsOrShare = 0.01
    decay_steps: StepsOrShare = 0.2
    final_ratio: Share = 0.1
    b1: DecayRate = 0.9
    b2: DecayRate = 0.95
    eps: Annotated[float, Between(least=1e-30, most=1)] = 1e-8
    weight_decay: Annotated[float, Between(least=0, most=100)] = 0.1
    decay_embedding: bool = True
    decay_vectors: bool = False
    clip_norm: Annotated[float, Between(least=1e-30, most=1e30)] | None = 1.0
    round_params: RoundParams = "stochastic"
    release_gradients: bool = False
    offload: bool = False

    def __post_init__(self) -> None:
        require_fields(self, "optimizer.")
        if self.transformation is not None and not is_optimizer(self.transformation):
            raise UserError(
                f"optimizer.transformation={brief(self.transformation)} is neither an optax "
                "transformation nor a function that makes one from a schedule, as in lambda "
                "schedule: optax.lion(schedule)."
            )
        # A field that is not at its default must have an effect beside the others.
        replaced = self.transformation is not None
        for present, names, reason in (
            (self.schedule != "wsd", ("decay_steps",), f'is for "wsd", not {self.schedule!r}'),
            (
                self.name == "adamw",
                ("moments",),
                'is for "fp8_adamw": "adamw" has them in FP32',
            ),
            (replaced, OF_ADAMW, "is of the named optimizers: give it to the transformation"),
            (replaced, IN_PARTS, "steps parameters apart; a transformation may need all at once"),
            (
                is_transformation(self.transformation),
                OF_SCHEDULE,
                "is of the schedule, which this transformation does not follow: let a function "
                "make it, as in lambda schedule: optax.lion(schedule)",
            ),
        ):
            for name in names:
                value, default = getattr(self, name), getattr(OptimizerConfig, name)
                if present and value != default:
                    raise UserError(
                        f"optimizer.{name}={value!r} {reason}. Leave it at {default!r}."
                    )
        # `coat.optax` checks the same in the words of its own arguments.
        as_directions = self.name == "fp8_adamw" and self.moments == "directions"
        if self.transformation is None and as_directions and self.b2 < least_b2(self.b1):
            raise UserError(
                f"optimizer.b2={self.b2} is below {least_b2(self.b1):g}, the least beside "
                f'optimizer.b1={self.b1} and optimizer.moments="directions". Raise b2, lower b1, '
                'or set moments to "expanded".'
            )

    def require_fitting(self, total_steps: int) -> None:
        """Raises unless a run of this many steps has room for its warmup and its decay."""
        rising, falling = self.phases(total_steps)
        values = self.warmup_steps, self.decay_steps if self.schedule == "wsd" else 0.0
        shares = all(isinstance(value, float) for value in values)
        if sum(values) > 1 if shares else rising + falling > total_steps:
            decay = f" and optimizer.decay_steps={self.decay_steps}" if falling else ""
            raise UserError(
                f"optimizer.warmup_steps={self.warmup_steps}{decay} take {rising + falling:,} "
                f"steps, and total_steps={total_steps:,}. Lower the former, or give a share of the "
                "run with a decimal point, as in 0.1."
            )

    def phases(self, total_steps: int) -> tuple[int, int]:
        """Returns how many steps the learning rate rises, and how many "wsd" falls at the end."""
        falling = self.decay_steps if self.schedule == "wsd" else 0
        return count_steps(self.warmup_steps, total_steps), count_steps(falling, total_steps)


def is_optimizer(value: Any) -> bool:
    """Returns whether a value may be a transformation. A dtype can be called, but is a class."""
    return is_transformation(value) or (callable(value) and not isinstance(value, type))


def is_transformation(value: Any) -> TypeGuard[optax.GradientTransformation]:
    """Returns whether a value is a transformation of optax, and not a class of them."""
    functions = getattr(value, "init", None), getattr(value, "update", None)
    return all(map(callable, functions)) and not isinstance(value, type)


def function_name(value: Callable[..., Any]) -> str:
    """Returns the name of a function, with its module if that can be imported."""
    named: Any = value.update if is_transformation(value) else value
    name = getattr(named, "__qualname__", type(named).__qualname__)
    module = getattr(named, "__module__", None)
    return name if module in (None, "<run_path>", "__main__") else f"{module}.{name}"


def count_steps(value: float, total_steps: int) -> int:
    """Returns a number of steps, from an int, or a share of all steps, from a float."""
    return value if isinstance(value, int) else round(value * total_steps)
