// nap(us, x, after) -> x, after sleeping: takes time without occupying a core. `after` is not read; it orders two naps.
#include <cstdint>
#include <cstring>
#include <ctime>

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

static ffi::Error Nap(int64_t us, ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::F32>, ffi::ResultBuffer<ffi::F32> y) {
  timespec rest = {static_cast<time_t>(us / 1000000), static_cast<long>(us % 1000000) * 1000};
  while (nanosleep(&rest, &rest) != 0) {
  }
  std::memcpy(y->typed_data(), x.typed_data(), x.size_bytes());
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(NapHandler, Nap,
                              ffi::Ffi::Bind()
                                  .Attr<int64_t>("us")
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>());
