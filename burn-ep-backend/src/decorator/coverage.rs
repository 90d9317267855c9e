//! Counts the decorator's methods against the installed Burn source.
//!
//! A forgotten method with a default body compiles and silently changes behaviour (`float_require_grad` defaults to doing
//! nothing), so this must not be left to the compiler.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use syn::{FnArg, ImplItem, Item, Pat, TraitItem, Type};

/// Op traits, the files that declare them below `src/backend/` of burn-backend, and how many methods each has.
const OP_TRAITS: [(&str, &str, usize); 7] = [
    ("FloatTensorOps", "ops/tensor.rs", 124),
    ("IntTensorOps", "ops/int_tensor.rs", 104),
    ("BoolTensorOps", "ops/bool_tensor.rs", 39),
    ("ModuleOps", "ops/modules/base.rs", 56),
    ("ActivationOps", "ops/activation.rs", 14),
    ("QTensorOps", "ops/qtensor.rs", 80),
    ("TransactionOps", "ops/transaction.rs", 1),
];

/// Methods that may go through `routing` instead of straight to `B`.
const ROUTED: [&str; 4] = ["attention", "embedding", "float_matmul", "linear"];

/// Method name to the names of its arguments.
type Methods = BTreeMap<String, Vec<String>>;

/// `src/backend` of the burn-backend this crate was built with.
fn burn_backend_source() -> PathBuf {
    let cargo = std::env::var("CARGO").unwrap_or_else(|_| "cargo".into());
    let output = Command::new(cargo)
        .args(["metadata", "--format-version", "1", "--offline"])
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .expect("cargo must be on the PATH: this test reads the source of burn-backend, which cargo locates");
    assert!(
        output.status.success(),
        "`cargo metadata --offline` failed; run `cargo fetch` so that the source of burn-backend is on this machine: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    let metadata: serde_json::Value = serde_json::from_slice(&output.stdout).expect("cargo metadata is JSON");
    let manifest = metadata["packages"]
        .as_array()
        .and_then(|packages| packages.iter().find(|p| p["name"] == "burn-backend"))
        .and_then(|p| p["manifest_path"].as_str())
        .expect("burn-backend is a dependency of this crate")
        .to_string();
    let source = Path::new(&manifest).with_file_name("src").join("backend");
    assert!(
        source.is_dir(),
        "{} is missing: run `cargo fetch`, and see OP_TRAITS if Burn moved its op traits",
        source.display()
    );
    source
}

fn parse(path: &Path) -> syn::File {
    let text = fs::read_to_string(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    syn::parse_file(&text).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

fn arguments<'a>(inputs: impl IntoIterator<Item = &'a FnArg>) -> Vec<String> {
    inputs
        .into_iter()
        .map(|arg| match arg {
            FnArg::Receiver(_) => "self".to_string(),
            FnArg::Typed(typed) => match &*typed.pat {
                Pat::Ident(name) => name.ident.to_string().trim_start_matches('_').to_string(),
                _ => "_".to_string(),
            },
        })
        .collect()
}

/// Methods a trait declares, except those behind a feature that this crate never enables.
fn declared(file: &syn::File, name: &str) -> Methods {
    let found = file.items.iter().find_map(|item| match item {
        Item::Trait(t) if t.ident == name => Some(t),
        _ => None,
    });
    let Some(found) = found else {
        panic!("trait {name} is not where it was: did Burn move it?");
    };
    let methods = found.items.iter().filter_map(|item| match item {
        TraitItem::Fn(f) if !f.attrs.iter().any(|a| a.path().is_ident("cfg")) => Some(f),
        _ => None,
    });
    methods.map(|f| (f.sig.ident.to_string(), arguments(&f.sig.inputs))).collect()
}

/// Methods `impl Name<..> for EpBackend<B>` has, and the text of each body.
fn implemented(file: &syn::File, name: &str) -> (Methods, BTreeMap<String, String>) {
    let block = file.items.iter().find_map(|item| match item {
        Item::Impl(block) => {
            let of = &block.trait_.as_ref()?.1.segments.last()?.ident;
            let Type::Path(target) = &*block.self_ty else { return None };
            (of == name && target.path.segments.last()?.ident == "EpBackend").then_some(block)
        }
        _ => None,
    });
    let block = block.unwrap_or_else(|| panic!("EpBackend does not implement {name}"));
    let (mut methods, mut bodies) = (Methods::new(), BTreeMap::new());
    for item in &block.items {
        if let ImplItem::Fn(f) = item {
            let stmts = &f.block.stmts;
            methods.insert(f.sig.ident.to_string(), arguments(&f.sig.inputs));
            bodies.insert(f.sig.ident.to_string(), quote(stmts));
        }
    }
    (methods, bodies)
}

/// Statements as text without spaces, to look for calls in.
fn quote(stmts: &[syn::Stmt]) -> String {
    use quote::ToTokens;
    let text: String = stmts.iter().map(|s| s.to_token_stream().to_string()).collect();
    text.split_whitespace().collect()
}

fn check(declared: &Methods, file: &syn::File, name: &str) {
    let (methods, bodies) = implemented(file, name);
    for (method, arguments) in declared {
        let found = methods
            .get(method)
            .unwrap_or_else(|| panic!("{name}::{method} is not delegated: run scripts/generate_decorator.py"));
        assert_eq!(found, arguments, "{name}::{method} takes other arguments");
        let body = &bodies[method];
        let direct = body.contains(&format!("B::{method}("));
        let routed = ROUTED.contains(&method.as_str()) && body.contains(&format!("routing::{method}::<B>("));
        assert!(
            direct || routed,
            "{name}::{method} does something else than call B::{method}: {body}"
        );
    }
    assert_eq!(
        methods.len(),
        declared.len(),
        "{name}: the decorator has methods that the trait lacks"
    );
}

#[test]
fn every_op_method_of_the_installed_burn_is_delegated() {
    let source = burn_backend_source();
    let generated = parse(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src/decorator/generated.rs"));
    let mut total = 0;
    for (name, file, expected) in OP_TRAITS {
        let methods = declared(&parse(&source.join(file)), name);
        assert_eq!(
            methods.len(),
            expected,
            "Burn changed {name}: regenerate the decorator, then update OP_TRAITS"
        );
        check(&methods, &generated, name);
        total += methods.len();
    }
    assert_eq!(total, 418);
}

#[test]
fn every_backend_and_autodiff_method_is_delegated() {
    let base = parse(&burn_backend_source().join("base.rs"));
    let decorator = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/decorator");
    let backend = declared(&base, "Backend");
    assert_eq!(backend.len(), 10);
    let autodiff = declared(&base, "AutodiffBackend");
    assert_eq!(autodiff.len(), 12);
    check(&backend, &parse(&decorator.join("mod.rs")), "Backend");
    check(&autodiff, &parse(&decorator.join("autodiff.rs")), "AutodiffBackend");
}

#[test]
fn every_moe_op_is_delegated() {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let methods = declared(&parse(&source.join("backend.rs")), "MoeBackend");
    assert!(methods.len() > 20, "found only {} ops", methods.len());
    check(&methods, &parse(&source.join("decorator/moe.rs")), "MoeBackend");
}
