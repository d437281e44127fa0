"""The implementation of ``AsyncLLM`` and ``LLM``.

A request's way in is prepare, session, bridge; its way out is collect, streams, batch.
"""
