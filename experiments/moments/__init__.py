"""Adam's moments: recorded in a training, and stored in every way that is compared.

recording           moments of a small Llama at some steps
coders              ways to store a moment; dynamic_exponent: the one of bitsandbytes
stored              Adam with moments that such a coder, or part of a format, stores at each step
errors              of an update, with moments that a coder stored once
drift               of the second moment over thousands of steps
picture             of what `optimizer_error` found
"""
