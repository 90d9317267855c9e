//! Cases from public bug reports, one file each; the report's number is in the file's first line.

mod backbone_names;
mod expert_counts;
mod packed_documents;
mod relu2_experts;
