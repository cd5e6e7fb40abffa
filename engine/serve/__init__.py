"""The service: one engine behind HTTP and gRPC, guarded, observed and drained.

The only place of the engine that imports FastAPI, uvicorn, grpc and prometheus_client. It reads the
engine through its public methods and changes it through `engine.runtime.control` alone.
"""
