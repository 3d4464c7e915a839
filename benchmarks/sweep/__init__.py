"""Every diffusers pipeline that declares an offload order, tiny, run three ways on the simulated accelerator.

A *case* names a pipeline class, makes its components from tiny configurations, and says what one request asks.
Families of cases are in ``families``; the sizes in them (widths, layers, channels) are facts taken from the
configurations in diffusers' own tests (https://github.com/huggingface/diffusers, ``tests/pipelines``, 0.42), or,
where there is no test, chosen to satisfy the class. Tokenizers and processors are made on the spot.
"""
