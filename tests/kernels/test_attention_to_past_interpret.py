"""The kernel of attention to the past in Triton's interpreter, against its reference."""

import interpreted
from attention_to_past_laws import AttentionToPastLaws

pytestmark = interpreted.MARKS


class TestKernel(AttentionToPastLaws):
    pass
