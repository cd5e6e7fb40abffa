"""The messages of the gRPC interface: `router.proto` and what protoc makes of it."""
