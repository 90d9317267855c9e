//! Cases from public bug reports, one subject a file; each file or test names the report it answers.

mod attention_sink;
mod backbone_names;
mod expert_counts;
mod expert_layer;
mod fused_adamw;
mod mxfp4;
mod packed_documents;
mod relu2_experts;
mod repeated_rows;
mod routing;
