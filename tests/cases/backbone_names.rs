//! Automodel#1126, axolotl#3508: a Nemotron-H file whose embedding is `backbone.embeddings.weight` must load, and be saved
//! under the same name.

use burn_moe::backend::{Device, Infer};
use burn_moe::checkpoint::{CheckpointSource, SaveOptions};
use burn_moe_models::{AutoModelForCausalLm, Pretrained};
use burn_moe_tests::fixture;

#[test]
fn backbone_names_load_and_are_saved_again() {
    let dir = fixture::root().join("nemotron_h/base");
    let Pretrained { model, source, report } =
        AutoModelForCausalLm::<Infer>::from_pretrained(&dir, &Default::default(), &Device::default()).unwrap();
    assert!(source.contains("backbone.embeddings.weight"));
    assert!(report.loaded.iter().any(|t| t.path == "embeddings.weight"), "{report}");

    let out = tempfile::tempdir().unwrap();
    let options = SaveOptions {
        like: Some(&source),
        ..Default::default()
    };
    model.save_pretrained(out.path(), &options).unwrap();
    let saved = CheckpointSource::open(out.path()).unwrap();
    assert_eq!(saved.names(), source.names());
    assert_eq!(
        saved.bytes("backbone.embeddings.weight"),
        source.bytes("backbone.embeddings.weight")
    );
}
