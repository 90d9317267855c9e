// The selective scan in chunks of 64 tokens (Dao and Gu 2024), shared part. Notation: i, j tokens of a chunk; P head size, N state
// size; cum_i sum of A delta over the tokens of i's document up to i, from the chunk start at the earliest.
//
//   Y_i = entry_i C_i S^T + sum_{j <= i, same document} exp(cum_i - cum_j) delta_j (C_i . B_j) x_j + D x_i
//   S'  = keep S + sum_j exit_j delta_j x_j B_j^T
//
// entry_i = exp(cum_i) where i sees the state before the chunk, exit_j = exp(cum_63 - cum_j) where the chunk end sees j, else 0;
// keep = entry_63. Tokens behind the sequence have delta 0 and belong to the document of the last token.
//
// Defines: P, N, HEADS, GROUPS; PACKED (documents), DOC_T (their integer type), DT_T (type of dt).
#define Q 64
#define REPEAT (HEADS / GROUPS)
#define PP ((P + 15) / 16 * 16)      // P and N as the products see them
#define NN ((N + 15) / 16 * 16)
// Strides in shared memory: rows fall on different banks.
#define P_ROW (PP + 8)
#define N_ROW (NN + 8)
#define Q_ROW (Q + 8)
// Tables of a chunk and head, Q numbers each.
enum Table { DELTA, CUM, ENTRY, EXIT, SLOPE, TABLES };

// Strides in elements; heads, channels and states are dense.
struct Info {
  u64 batch, seq, chunks;
  u64 x_batch, x_token, dt_batch, dt_token, b_batch, b_token, c_batch, c_token, dy_batch, dy_token;
  u64 dt_min, dt_max;                // bits of a float
};

// Chunk and head of a block that works on one: heads are next to each other, so that those of a group share B and C in the cache.
struct Place { int batch, chunk, head, valid; u64 token; };
__device__ __forceinline__ Place place(const Info& info, u32 block, int heads) {
  Place p;
  p.head = block % heads;
  p.chunk = block / heads % (u32)info.chunks;
  p.batch = block / heads / (u32)info.chunks;
  p.token = (u64)p.chunk * Q;
  p.valid = (int)min((u64)Q, info.seq - p.token);
  return p;
}
// Number of a chunk and head in the tables and states.
__device__ __forceinline__ u64 chunk_head(const Info& info, const Place& p, int head) {
  return ((u64)p.batch * info.chunks + p.chunk) * HEADS + head;
}

// Four numbers of a state, or one if N is not a multiple of four.
#define LANES (N % 4 == 0 ? 4 : 1)
struct __align__(4 * LANES) Floats { float v[LANES]; };
struct __align__(4 * LANES) Words { Word v[LANES]; };
