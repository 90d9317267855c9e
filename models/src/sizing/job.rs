//! Time and traffic of a step on a cluster, on paper.
//!
//! A step is the sum of what follows one another today: products, selective scans, the exchange of rows, the sums of gradients and
//! gathered weights, the update. Nothing is taken to overlap. Rates are those measured on one H200 (`benches/RESULTS.md`) and, for
//! links, given by the caller.

use std::fmt;

use burn_moe::train::Recompute;
use burn_moe::{Error, Result};
use serde::Serialize;

use super::layers::layer_sizes;
use super::memory::{MemoryPlan, MemorySettings, bytes};
use crate::AutoConfig;

/// Seconds of one selective scan with its convolution and gated norm, forward and backward, for one token and one of heads x head
/// size x states: 2.08 ms for 4096 tokens of a Nemotron 3 Nano layer.
const SCAN_SECONDS: f64 = 2.08e-3 / 4096.0 / (64.0 * 64.0 * 128.0);

/// Devices and links.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Cluster {
    /// GPUs of the job.
    pub gpus: usize,
    /// GPUs of one host.
    pub node: usize,
    /// Bytes of a GPU.
    pub memory: u64,
    /// Dense bf16 peak of a GPU in operations a second.
    pub peak: f64,
    /// Part of the peak that products reach.
    pub efficiency: f64,
    /// Bytes a second that the update reads and writes.
    pub memory_bandwidth: f64,
    /// Bytes a second of a GPU each way to GPUs of its host.
    pub node_bandwidth: f64,
    /// Bytes a second of a GPU each way to other hosts.
    pub network_bandwidth: f64,
}

impl Cluster {
    /// H200 GPUs, eight to a host, as measured on one of them; NVLink as NCCL uses it between two, and a 400 Gbit/s network card
    /// for each GPU at nine tenths of its rate.
    pub fn h200(gpus: usize) -> Self {
        Self {
            gpus,
            node: 8,
            memory: 141_000_000_000,
            peak: 989.5e12,
            efficiency: 0.5,
            memory_bandwidth: 3.8e12,
            node_bandwidth: 257e9,
            network_bandwidth: 45e9,
        }
    }

    fn validate(&self) -> Result<()> {
        for (field, value) in [("gpus", self.gpus), ("node", self.node)] {
            if value == 0 {
                return Err(Error::config(field, 0, "at least 1"));
            }
        }
        if self.gpus > self.node && !self.gpus.is_multiple_of(self.node) {
            return Err(Error::config(
                "gpus",
                self.gpus,
                format!("a multiple of the {} of a host", self.node),
            ));
        }
        for (field, value) in [
            ("peak", self.peak),
            ("efficiency", self.efficiency),
            ("memory bandwidth", self.memory_bandwidth),
            ("node bandwidth", self.node_bandwidth),
            ("network bandwidth", self.network_bandwidth),
        ] {
            if !(value.is_finite() && value > 0.0) {
                return Err(Error::config(field, value, "a positive number"));
            }
        }
        Ok(())
    }
}

/// The job besides the model and the cluster. World and mesh of `memory` are those of the cluster.
#[derive(Debug, Clone)]
pub struct JobSettings {
    /// `world` is ignored: the GPUs of the cluster are the ranks.
    pub memory: MemorySettings,
    /// Count the update into the time of a step.
    pub with_update: bool,
}

/// Bytes that a GPU sends in one step.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct Traffic {
    /// To GPUs of its host.
    pub node: f64,
    /// To other hosts.
    pub network: f64,
}

impl Traffic {
    fn seconds(self, cluster: &Cluster) -> f64 {
        self.node / cluster.node_bandwidth + self.network / cluster.network_bandwidth
    }

    fn total(self) -> f64 {
        self.node + self.network
    }
}

/// A job on paper; times in seconds of one step.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct JobPlan {
    pub cluster: Cluster,
    pub ep: usize,
    /// Bytes of each GPU.
    pub memory: MemoryPlan,
    /// Tokens of a GPU in one step.
    pub tokens: f64,
    /// Operations of a token, recomputation not counted.
    pub flops_per_token: f64,
    /// Rows of experts, there and back, in both passes.
    pub rows: Traffic,
    /// Sums of gradients and gathered weights.
    pub gradients: Traffic,
    pub products: f64,
    pub scans: f64,
    pub row_exchange: f64,
    pub gradient_exchange: f64,
    pub update: f64,
}

impl JobPlan {
    /// The plan of `config` on `cluster`, with the experts over `settings.memory.ep` GPUs.
    ///
    /// # Errors
    /// Numbers out of range and sizes that do not divide, by name.
    pub fn new(config: &AutoConfig, cluster: &Cluster, settings: &JobSettings) -> Result<Self> {
        cluster.validate()?;
        let memory_settings = MemorySettings {
            world: cluster.gpus,
            ..settings.memory.clone()
        };
        let memory = MemoryPlan::new(config, &memory_settings)?;
        let s = &memory_settings;
        let width = bytes(s.dtype);
        let layers = layer_sizes(config);
        let repeated = match s.recompute {
            Recompute::None => 0.0,
            _ => (0..layers.len()).filter(|&i| s.recompute.recomputes(i)).count() as f64 / layers.len().max(1) as f64,
        };
        let tokens = (s.rows * s.seq * s.micro_batches) as f64;
        let flops_per_token = config.flops_per_token(s.seq);
        // A third of the work of a step is its forward pass.
        let again = 1.0 + repeated / 3.0;
        let products = tokens * flops_per_token * again / (cluster.peak * cluster.efficiency);
        let scan: usize = layers.iter().map(|layer| layer.scan).sum();
        let scans = tokens * scan as f64 * SCAN_SECONDS * again;

        // Rows of a token: there and back in each pass, and once more there and back where the forward pass is repeated.
        let row_bytes: f64 = layers
            .iter()
            .filter_map(|l| l.routed)
            .map(|(k, row)| (k * row) as f64 * width)
            .sum();
        let rows = spread(tokens * row_bytes * (4.0 + 2.0 * repeated), s.ep, 1, cluster);
        let (dense, experts) = (memory.dense_parameters as f64, memory.expert_parameters as f64);
        // fp32 gradients are summed into shares, weights gathered in their dtype.
        let exchanged = 4.0 + width;
        let mut gradients = spread(dense * exchanged, cluster.gpus, 1, cluster);
        let replicas = spread(experts * exchanged, cluster.gpus / s.ep, s.ep, cluster);
        gradients.node += replicas.node;
        gradients.network += replicas.network;

        // Read and write weights and state, read gradients.
        let share = |parameters: f64, ranks: usize| parameters / if s.shard_optimizer { ranks as f64 } else { 1.0 };
        let updated = share(dense, cluster.gpus) + share(experts, cluster.gpus / s.ep);
        let state = memory.optimizer as f64 * 2.0;
        let update = match (&s.optimizer, settings.with_update) {
            (Some(_), true) => (updated * (2.0 * width + 2.0 * width) + state) / cluster.memory_bandwidth,
            _ => 0.0,
        };
        Ok(Self {
            cluster: *cluster,
            ep: s.ep,
            memory,
            tokens,
            flops_per_token,
            rows,
            gradients,
            products,
            scans,
            row_exchange: rows.seconds(cluster),
            gradient_exchange: gradients.seconds(cluster),
            update,
        })
    }

    /// Seconds of a step.
    pub fn seconds(&self) -> f64 {
        self.products + self.scans + self.row_exchange + self.gradient_exchange + self.update
    }

    /// Tokens per second of one GPU.
    pub fn tokens_per_second(&self) -> f64 {
        self.tokens / self.seconds()
    }

    /// Whether the plan fits in the memory of a GPU.
    pub fn fits(&self) -> bool {
        self.memory.total() <= self.cluster.memory
    }
}

/// Bytes that leave a GPU when `bytes` are dealt evenly over a group of `ranks` GPUs, `step` apart.
fn spread(bytes: f64, ranks: usize, step: usize, cluster: &Cluster) -> Traffic {
    if ranks <= 1 {
        return Traffic::default();
    }
    let here = (cluster.node / step).clamp(1, ranks) as f64;
    let part = bytes / ranks as f64;
    Traffic {
        node: part * (here - 1.0),
        network: part * (ranks as f64 - here),
    }
}

impl fmt::Display for JobPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let gib = |bytes: f64| bytes / f64::from(1 << 30);
        let c = &self.cluster;
        writeln!(
            f,
            "{} GPUs, {} to a host, experts over {}, {} tokens a GPU and step, {:.1} GFLOP a token",
            c.gpus,
            c.node.min(c.gpus),
            self.ep,
            self.tokens,
            self.flops_per_token / 1e9
        )?;
        writeln!(f, "\n{}", self.memory)?;
        let verdict = if self.fits() { "fits" } else { "does not fit" };
        writeln!(f, "{:<18} {:>9.2} GiB: {verdict}\n", "memory of a GPU", gib(c.memory as f64))?;
        for (name, seconds, traffic) in [
            ("products", self.products, None),
            ("selective scans", self.scans, None),
            ("rows of experts", self.row_exchange, Some(self.rows)),
            ("gradients, weights", self.gradient_exchange, Some(self.gradients)),
            ("update", self.update, None),
        ] {
            write!(f, "{name:<18} {:>9.1} ms", seconds * 1e3)?;
            match traffic.filter(|traffic| traffic.total() > 0.0) {
                Some(traffic) => writeln!(
                    f,
                    "   {:.2} GiB inside the host, {:.2} GiB to others",
                    gib(traffic.node),
                    gib(traffic.network)
                )?,
                None => writeln!(f)?,
            }
        }
        let tflops = self.flops_per_token * self.tokens_per_second() / 1e12;
        writeln!(f, "{:<18} {:>9.1} ms", "step", self.seconds() * 1e3)?;
        write!(
            f,
            "{:.0} tokens/s a GPU, {tflops:.0} TFLOP/s, MFU {:.0} % (nothing overlaps)",
            self.tokens_per_second(),
            100.0 * tflops * 1e12 / c.peak
        )
    }
}

#[cfg(test)]
mod tests {
    use burn_moe::optim::{AdamWConfig, MomentDType};

    use super::*;
    use crate::benchmark::Preset;

    fn plan(preset: &str, layers: Option<usize>, cluster: Cluster, memory: MemorySettings, with_update: bool) -> JobPlan {
        let config = Preset::find(preset).unwrap().config(layers, None).unwrap();
        let memory = MemorySettings {
            optimizer: Some(AdamWConfig {
                master_weights: false,
                moments: MomentDType::Param,
                ..AdamWConfig::default()
            }),
            ..memory
        };
        JobPlan::new(&config, &cluster, &JobSettings { memory, with_update }).unwrap()
    }

    /// `benches/RESULTS.md`, 2026-12-01, one H200: tokens per second of whole steps and without the optimizer.
    #[test]
    fn one_gpu_is_predicted_within_fifteen_percent() {
        for (preset, layers, rows, whole, plain) in [
            ("qwen3_30b_a3b", 8, 4, 83_341.0, 94_723.0),
            ("qwen3_30b_a3b", 8, 2, 69_953.0, 89_585.0),
            ("nemotron3_nano", 14, 1, 36_197.0, 53_145.0),
        ] {
            for (measured, with_update) in [(whole, true), (plain, false)] {
                let plan = plan(preset, Some(layers), Cluster::h200(1), MemorySettings::new(rows, 4096), with_update);
                let ratio = plan.tokens_per_second() / measured;
                assert!(
                    (0.85..1.15).contains(&ratio),
                    "{preset}, {rows} rows: {ratio:.2} of the measured {measured}\n{plan}"
                );
            }
        }
    }

    /// Rows that NeMo AutoModel publishes for 80 GB H100s (performance summary and blog; the second and the fourth count no update
    /// or more layers). Their layout differs, and they send a token once to a GPU where we send a row for each of its experts: the
    /// plan must be within a factor of two.
    #[test]
    fn published_rows_of_others_are_of_the_predicted_order() {
        let all = Recompute::All;
        for (preset, gpus, ep, rows, accumulation, recompute, published) in [
            ("qwen3_30b_a3b", 8, 8, 4, 16, all, 12_040.0),
            ("qwen3_30b_a3b", 8, 8, 1, 1, Recompute::None, 11_340.0),
            ("nemotron3_nano", 8, 8, 4, 16, all, 16_789.0),
            ("nemotron3_ultra", 128, 64, 2, 1, all, 815.0),
        ] {
            let memory = MemorySettings {
                ep,
                micro_batches: accumulation,
                recompute,
                ..MemorySettings::new(rows, 4096)
            };
            let plan = plan(preset, None, Cluster::h200(gpus), memory, true);
            let ratio = plan.tokens_per_second() / published;
            assert!(
                (0.5..2.0).contains(&ratio),
                "{preset} on {gpus}: {ratio:.2} of the published {published}\n{plan}"
            );
        }
    }

    #[test]
    fn traffic_is_that_of_an_even_deal() {
        let cluster = Cluster {
            node: 4,
            ..Cluster::h200(16)
        };
        // 16 ranks: 3 of them here, 12 elsewhere.
        assert_eq!(spread(16.0, 16, 1, &cluster), Traffic { node: 3.0, network: 12.0 });
        assert_eq!(spread(8.0, 4, 1, &cluster), Traffic { node: 6.0, network: 0.0 });
        // Replicas 8 apart are never on one host.
        assert_eq!(spread(2.0, 2, 8, &cluster), Traffic { node: 0.0, network: 1.0 });
        assert_eq!(spread(5.0, 1, 1, &cluster), Traffic::default());
    }

    #[test]
    fn rows_of_qwen3_on_eight_gpus() {
        let memory = MemorySettings {
            ep: 8,
            ..MemorySettings::new(1, 4096)
        };
        let plan = plan("qwen3_30b_a3b", None, Cluster::h200(8), memory, true);
        // 48 layers, 8 rows of 2048 bf16 numbers, there and back, forward and backward, 7 of 8 to other GPUs.
        let expected = 48.0 * 8.0 * 2048.0 * 2.0 * 4.0 * 4096.0 * 7.0 / 8.0;
        assert!((plan.rows.node / expected - 1.0).abs() < 1e-9 && plan.rows.network == 0.0);
        assert!(plan.fits(), "{plan}");
    }

    #[test]
    fn numbers_out_of_range_are_refused_by_name() {
        let config = Preset::find("qwen3_30b_a3b").unwrap().config(None, None).unwrap();
        let settings = JobSettings {
            memory: MemorySettings::new(1, 4096),
            with_update: true,
        };
        for (cluster, field) in [
            (Cluster::h200(0), "gpus"),
            (Cluster::h200(12), "gpus"),
            (
                Cluster {
                    network_bandwidth: 0.0,
                    ..Cluster::h200(8)
                },
                "network bandwidth",
            ),
            (
                Cluster {
                    efficiency: f64::NAN,
                    ..Cluster::h200(8)
                },
                "efficiency",
            ),
        ] {
            let error = JobPlan::new(&config, &cluster, &settings).unwrap_err().to_string();
            assert!(error.contains(field), "{error}");
        }
    }
}
