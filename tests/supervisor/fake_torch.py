"""A made-up module `torch` with an allocator of 100 MiB, as text: for a file beside `snapshots` as `made_up`.

It has what the instrument looks for; a tensor takes its bytes, and what does not fit fails as torch fails.
"""

TORCH = """
    import sys
    import made_up
    __version__ = "9.9"
    TOTAL = 100 * made_up.MIB
    allocator = made_up.Allocator()
    most = retries = 0
    records, observers, waiting, kept = [], [], [], []
    backend = "native"
    is_up = False
    node = None
    class OutOfMemoryError(RuntimeError):
        pass
    class version:
        cuda = "9"
    class _Device:
        type = "cuda"
    class Tensor:
        __torch_dispatch__ = None
        device, requires_grad, dtype, grad = _Device, False, "torch.uint8", None
        def __init__(self, size):
            self.shape = (size,)
            self.address = take(size, sys._getframe(1))
        def __del__(self):
            allocator.free(self.address)
        def numel(self):
            return self.shape[0]
        def element_size(self):
            return 1
        def untyped_storage(self):
            return self
        def data_ptr(self):
            return self.address
        def nbytes(self):
            return self.shape[0]
    class nn:
        class Module:
            def __init__(self):
                self._parameters, self._buffers, self._modules = {}, {}, {}
            def named_modules(self, prefix=""):
                yield prefix, self
                for name, child in self._modules.items():
                    yield from child.named_modules(prefix + ("." if prefix else "") + name)
    class optim:
        class Optimizer:
            pass
    class autograd:
        @staticmethod
        def backward(loss):
            loss()
    class _C:
        class DisableTorchFunctionSubclass:
            def __enter__(self):
                pass
            def __exit__(self, *error):
                pass
        def _cuda_record_memory_history(*arguments):
            records.append(arguments)
        def _cuda_attach_out_of_memory_observer(observer):
            observers.append(observer)
        def _current_autograd_node():
            return node
    class _Properties:
        name, uuid, total_memory = "NVIDIA Fake", "aa", TOTAL
    class cuda:
        def _lazy_call(call):
            waiting.append(call)
        def is_initialized():
            return is_up
        def device_count():
            return 1
        def current_device():
            return 0
        def get_device_properties(index):
            return _Properties
        def get_allocator_backend():
            return backend
        def max_memory_allocated(index):
            return most
        def max_memory_reserved(index):
            return most
        def memory_stats(index):
            return {"allocated_bytes.all.current": allocator.allocated, "num_alloc_retries": retries}
        class memory:
            def _record_memory_history(enabled, context, stacks, max_entries):
                _C._cuda_record_memory_history(enabled, context, stacks, max_entries)
            def _snapshot():
                return dict(allocator.snapshot(), allocator_settings={})
    def init():
        global is_up
        for call in waiting:
            call()
        is_up = True
    def take(size, frame):
        global most
        is_up or init()
        assert records or backend != "native" or not observers, "the history began too late"
        named = []
        while frame is not None:
            named.append((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
            frame = frame.f_back
        free = TOTAL - allocator.allocated
        if size > free:
            allocator.fail(size, free, *named)
            for observer in observers:
                observer(0, -(-size // (2 * made_up.MIB)) * 2 * made_up.MIB, TOTAL, free)
            raise OutOfMemoryError("CUDA out of memory. Tried to allocate %d" % size)
        address = allocator.alloc(size, *named)
        most = max(most, allocator.allocated)
        return address
    """
