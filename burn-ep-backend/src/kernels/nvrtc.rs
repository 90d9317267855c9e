//! Compile checks of CUDA sources without a GPU. They need libnvrtc on the library path and, for sources with includes, the
//! headers of `CUDA_PATH` (pip packages `nvidia-cuda-nvrtc`, `nvidia-cuda-runtime`, `nvidia-cuda-cccl`, `nvidia-cuda-crt`).

use std::ffi::{CStr, CString};

use cudarc::nvrtc::result as nvrtc;

/// Compiles `source` for sm_90a and panics with the compiler's log if that fails.
pub fn compile_for_sm_90a(source: &str) {
    let text = CString::new(source).expect("source without NUL");
    let program = nvrtc::create_program(&text, None).expect("libnvrtc on LD_LIBRARY_PATH");
    let cuda = std::env::var("CUDA_PATH").unwrap_or("/usr/local/cuda".into());
    let options = [
        "--gpu-architecture=sm_90a".to_string(),
        format!("--include-path={cuda}/include"),
        format!("--include-path={cuda}/include/cccl"),
    ];
    // SAFETY: `program` came from create_program above and is destroyed once, below.
    unsafe {
        let compiled = nvrtc::compile_program(program, &options);
        let log = nvrtc::get_program_log(program).expect("log");
        let log = CStr::from_ptr(log.as_ptr()).to_string_lossy().into_owned();
        assert!(compiled.is_ok(), "{log}\n{source}");
        nvrtc::destroy_program(program).expect("destroy");
    }
}
